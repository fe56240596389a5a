"""Data and gradients: leases portions, has batches computed, and discards unusable gradients.

This is the worker's own `StepSource` (`interface.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import numpy as np

from dlctl.algorithms.base import ReplicaSide
from dlctl.algorithms.needs import (
    Done,
    Engine,
    Gradient,
    Named,
    Need,
    NextBatch,
    NextData,
    NextRows,
    OwnState,
    OwnStep,
    Step,
)
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import (
    Compute,
    Computed,
    EngineRan,
    FailedSample,
    NameRows,
    RowsNamed,
    StopCompute,
)
from dlctl.roles.worker.accounts import Accounts
from dlctl.roles.worker.leases import Counted, Leasing, Portion
from dlctl.roles.worker.links import Links
from dlctl.roles.worker.services.base import STUCK_S_MIN, Phase, Service
from dlctl.roles.worker.services.engines import Engines
from dlctl.roles.worker.services.losses import Losses
from dlctl.roles.worker.services.portion_reports import PortionReports
from dlctl.roles.worker.services.writing import Writing
from dlctl.roles.worker.settings import WorkTerms
from dlctl.wire import messages as m
from dlctl.wire.machine import Event

BATCH_WEIGHT = 0.1
"""Weight of the newest batch in the running mean of the time per batch."""
STUCK_BATCHES = 10.0
"""A batch that takes longer than `STUCK_S_MIN`, and than so many usual batches, hangs in user code;
an evaluation is reported, too, but may legitimately take that long."""
LONG_S_MIN, LONG_BATCHES = 2.0, 3.0  # A straggling batch is reported, but is no fault yet.


class Computing:
    """Serves `NextData`, `NextRows`, `Gradient` and `Done`."""

    def __init__(
        self,
        links: Links,
        terms: WorkTerms,
        accounts: Accounts,
        writing: Writing,
        side: ReplicaSide,
        averaged: m.Array,
    ) -> None:
        """averaged: float64[n], the model's buffers."""
        self.context, self.identity = links.context, links.identity
        self.accounts, self.portions = accounts, accounts.portions
        self.bad_gradients, self.progress = accounts.bad_gradients, accounts.progress
        self.writing, self.side = writing, side
        self.own_rate = terms.own_rate
        self._stops_between_batches = terms.stops_between_batches
        self.averaged = averaged
        """float64[n]: the model's buffers after the newest step."""
        self.leasing = Leasing(self.context, self.identity, self.portions)
        self.reports = PortionReports(self.context, self.identity, accounts, writing)
        self.engines = Engines(self.context, self.is_held)
        self.holds = False
        self.losses = Losses()
        self.draining = False
        """The replica leaves: it ends where no portion is partly processed."""
        self._is_told_of_end = False
        """The method was notified that there is no data, because the replica leaves."""
        self._need: NextData | Gradient | Done | None = None
        self._running: tuple[Portion, int, int] | None = None
        """Portion, first batch and number of batches that are being computed."""
        self._ticket = 0
        """Of the newest computation (`Compute.ticket`)."""
        self._busy_since = 0.0
        self.batch_s = 0.0
        """Time per batch, smoothed; 0: unknown yet."""
        self._step: Step | None = None
        self._announced = self._was_refused = False
        """`NextData` has announced the next batch; that batch was computed and refused, or its
        computation was stopped."""
        self._naming: int | None = None
        """Number of batches whose rows are being determined."""
        self._named: Named | None = None
        """The rows of the batches that were announced."""
        self._was_empty = False
        """The announced batch was empty or skipped. The next one is computed instead, if what the
        method was told of that one holds for this one, too."""

    # ------------------------------------------------------------ the source of steps

    def services(self) -> dict[type[Need], Service[Any]]:
        mine = dict.fromkeys((NextData, NextRows, Gradient, Done), self)
        return {**mine, **dict.fromkeys((Engine, OwnStep, OwnState), self.engines)}

    def on_event(self, event: Event, now: float) -> None:
        match event:
            case Computed():
                self._on_computed(event, now)
                self.side.step_s = self.batch_s
            case RowsNamed():
                self._on_rows_named(event)
            case EngineRan():
                self.engines.on_ran(event, now)

    def on_lease(self, lease: m.Lease, now: float) -> None:
        self.leasing.on_lease(lease, now)

    def acted(self) -> None:
        self.leasing.told_no_data = False

    def has_ended(self) -> bool:
        return self._is_told_of_end and self._ends_here()

    def is_computing(self) -> bool:
        return self._running is not None

    def is_at_work(self) -> bool:
        return self._running is not None or self.engines.is_at_work

    def recall(self) -> None:
        """A batch does not take long."""

    def can_stop(self) -> bool:
        return self._stops_between_batches

    def stop(self) -> None:
        """Not while it drains: one that is slower than the others would never end its portion."""
        if self._running is not None and self.can_stop() and not self.draining:
            self.context.do(StopCompute(self._ticket))

    def drain(self) -> None:
        self.draining = True

    # ------------------------------------------------------------ the service

    def begin(self, need: NextData | Gradient | Done, now: float) -> None:
        self._need = need

    def poll(self, now: float) -> tuple[bool, Any]:
        match self._need:
            case Gradient():
                return self._gradient(self._need, now)
            case NextRows():
                return self._next_rows(self._need, now)
            case NextData():
                return self._next_data(now)
            case need:
                assert need is not None
                self.reports.done_without_push(need.but, now)
                return True, None

    def phase(self) -> Phase:
        if self._running or self._naming is not None:
            return Phase("computing")
        if self.is_held():
            return Phase("saving")
        return Phase("waiting for data")

    def deadline(self) -> float | None:
        return self.leasing.ask_again_at

    def _ends_here(self) -> bool:
        """Whether this replica leaves, and no portion is partly done."""
        return self.draining and self.portions.at_boundary()

    # ------------------------------------------------------------ data

    def _gradient(self, need: Gradient, now: float) -> tuple[bool, Step | None]:
        are_own = need.step and not need.gather
        assert need.steps == 1 or are_own, "several steps are the replica's own"
        assert need.pull is None or are_own, "only the loss's own gradient is returned"
        if self._running:
            return False, None
        if self._step is not None or self._was_refused:
            step, self._step, self._was_refused = self._step, None, False
            return True, step
        if self._was_empty and (need.rows is not None or not self._goes_on()):
            self._was_empty = False  # The next one must be announced, and its rows be determined.
            return True, None
        if self._announced and self._ends_here():
            # The batch was announced before the end: the method must be notified of the end where
            # it requests data, which is where it pushes its accrued gradients.
            self._announced = False
            return True, None
        done, data = self._find_data(now)
        if data is not None:
            if not self.is_held():
                self._compute(need, now)
            return False, None
        self._was_empty &= not done
        return done, None

    def _goes_on(self) -> bool:
        """Whether the next batch is within the portion that the one before it was within: neither
        its first nor its last.
        """
        data = self.portions.ahead()
        return data is not None and data.number > 0 and not data.is_last

    def is_held(self) -> bool:
        """Whether no batch may begin because the replica's state is about to be saved."""
        is_amid = self.side.is_in_step or self.writing.has_unpushed_steps()
        return self.holds and not is_amid

    def _next_rows(self, need: NextRows, now: float) -> tuple[bool, Named | None]:
        """Find the next data, and determine the rows of the batches ahead."""
        if self._naming is not None:
            named, self._named = self._named, None
            if named is not None:
                self._naming, self._announced = None, True
            return named is not None, named
        done, data = self._find_data(now)
        if data is None:
            self._announced = False
            return done, None
        portion, number, count = self.portions.batches_ahead(need.steps)
        if not self._has_rows():
            self._announced = True
            return True, Named(np.empty(0, np.int64), count)
        lease, self._naming, self._busy_since = portion.lease, count, now
        place = (lease.data_epoch, lease.start, lease.stop, number, count)
        self.context.do(NameRows(*place, portion.batch_size, lease.shard))
        return False, None

    def _has_rows(self) -> bool:
        """Whether the task has any tables of rows."""
        clients = (client for table in self.writing.tables for client in table[:1])
        return any(client.rows is not None and client.rows.tables.size for client in clients)

    def _on_rows_named(self, event: RowsNamed) -> None:
        assert self._naming is not None
        self._named = Named(event.rows, self._naming)

    def _next_data(self, now: float) -> tuple[bool, NextBatch | None]:
        done, data = self._find_data(now)
        self._announced = data is not None
        return done, data

    def _find_data(self, now: float) -> tuple[bool, NextBatch | None]:
        """(whether this is an answer for the method, the batch to compute next if there is one)."""
        if self._ends_here():
            # The first time the method can still push its accrued gradients; then it is parked.
            is_first, self._is_told_of_end = not self._is_told_of_end, True
            return is_first, None
        if self.holds and self.writing.is_in_parts():
            return True, None  # A save must contain all steps completely.
        data = self.portions.ahead()
        return (True, data) if data is not None else (self.leasing.wait(now), None)

    def _compute(self, need: Gradient, now: float) -> None:
        portion, number, count = self.portions.next_batches(need.steps)
        self._running, self._busy_since = (portion, number, count), now
        for clients in self.writing.tables[:1]:
            for c in clients:
                c.base_version = c.basis.version
        lease = portion.lease
        own_lr = self.own_rate.at(self.progress.samples) if need.step else None
        limit = self.bad_gradients.norm_max(None if need.gather else own_lr)
        place = (lease.data_epoch, lease.start, lease.stop, number)
        cut = (portion.batch_size, lease.shard)
        own = (need.pull, need.fresh)
        self._ticket += 1
        self.context.do(
            Compute(
                *place,
                own_lr,
                need.gather,
                limit,
                count,
                *cut,
                *own,
                need.rows,
                sums=need.sums,
                portion=lease.portion,
                ticket=self._ticket,
            )
        )
        if not self.draining:
            self.leasing.look_ahead(self.batch_s, now)

    # ------------------------------------------------------------ gradients

    def _on_computed(self, event: Computed, now: float) -> None:
        """Gradients have arrived. An unusable one is discarded."""
        assert self._running is not None
        portion, number, _ = self._running
        self._running = None
        if event.is_stopped:
            # A replica that ends no gradient must learn all the same what is usual for it.
            self._learn((now - self._busy_since) / event.computed)
            portion.next_number, self._was_refused = number, True
            self._announced = False
            return
        losses = [*event.before, *([event.loss] if event.is_usable else [])]
        took_s = (now - self._busy_since) / max(len(losses), 1)
        self._learn(took_s)
        announced, self._announced = self._announced, False
        self._report_failed(event.failed, portion, now)
        lacking = Counter(failed.number for failed in event.failed)
        if event.ended_after is not None:
            portion.end_in(number + len(event.before), event.ended_after)
            self.leasing.ended(portion)
        samples = 0
        for loss, metrics in zip(losses, event.metrics or repeat({}), strict=False):
            start, stop = portion.batch_range(number)
            used = stop - start - lacking[number]
            self.accounts.step_made(self.writing.steps, used, took_s, portion.in_words(number))
            self.writing.steps += 1
            self.portions.count(Counted(portion, used, loss, metrics, 1))
            self.losses.follow(loss, metrics)
            samples += used
            number += 1
        if losses:
            mean = sum(losses) / len(losses)
            norm = event.norm if event.is_usable else math.inf
            self._step = Step(event.gradient, samples, mean, norm, len(losses), event.rows)
            self.averaged = event.averaged
        is_named = (announced or self._was_empty) and not losses
        self._was_empty = is_named and event.is_skipped
        if not event.is_usable:
            if not event.is_skipped:
                self._refuse(event, portion, number)
                self._was_refused = is_named
            number += 1
        portion.next_number = number
        if portion.is_last(number - 1):
            self.reports.computed(portion, now)

    def _learn(self, took_s: float) -> None:
        """A batch took so long, or would have."""
        self.batch_s += (BATCH_WEIGHT if self.batch_s else 1.0) * (took_s - self.batch_s)

    def _refuse(self, event: Computed, portion: Portion, number: int) -> None:
        """Discard an unusable gradient: a NaN would stay in the residual for ever."""
        self.bad_gradients.discard(f"{event.odd}, {portion.in_words(number)}")
        self.bad_gradients.note(self.context)

    def _report_failed(self, failed: Iterable[FailedSample], portion: Portion, now: float) -> None:
        """Report samples that could not be loaded: the coordinator counts those of all workers."""
        data_epoch, me = portion.lease.data_epoch, self.identity
        for each in failed:
            key = ("sample", data_epoch, each.sample)
            if key not in self.context.retries:
                failure = (data_epoch, each.sample, each.error, each.detail, portion.lease.portion)
                self.context.ask(key, COORDINATOR, m.SampleFailed(me.slot, me.term, *failure), now)

    def on_done(self, done: list[Portion], now: float) -> None:
        self.reports.done(done, now)

    # ------------------------------------------------------------ figures and time

    def metrics(self, now: float) -> dict[str, Any]:
        found = self.losses.metrics()
        if self.own_rate.factor is not None:
            found["inner_lr"] = self.own_rate.at(self.progress.samples)
        found["request"] = self.leasing.number
        return found

    def paused(self, now: float) -> None:
        """Start the time of the current work over: an evaluation is running from now on."""
        self._busy_since = now

    def stuck_s(self, now: float, *, evaluates: bool) -> float:
        """How long the current batch or evaluation has taken, if far too long, else 0."""
        is_busy = self._running or self._naming is not None or evaluates
        took_s = now - self._busy_since if is_busy else 0.0
        if took_s > max(STUCK_S_MIN, STUCK_BATCHES * self.batch_s):
            return took_s
        return self.engines.stuck_s(now)

    def long_s(self, now: float) -> float:
        """How long the current batch has taken, if longer than usual, else 0."""
        took_s = now - self._busy_since if self._running else 0.0
        return took_s if took_s > max(LONG_S_MIN, LONG_BATCHES * self.batch_s) else 0.0
