"""Steps of a training loop of the user's own: a `StepSource` (`interface.py`) for `dlctl.attach`.

The loop computes; this lends it the model for as many steps as the method wants in a row, takes
what it has made, and leases data when the loop says that it needs some. A portion is done when all
of its samples were delivered to steps that are in settled pushes, whatever batches the loop cuts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from dlctl.algorithms.base import ReplicaSide
from dlctl.algorithms.needs import (
    Done,
    Gradient,
    Need,
    NextBatch,
    NextData,
    OwnState,
    OwnStep,
    Step,
)
from dlctl.roles.protocol.effects import EngineRan
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.roles.protocol.loop_effects import (
    DataWanted,
    GiveData,
    LendModel,
    LoopLeft,
    LoopStep,
    LoopStepped,
    RecallModel,
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

STEP_WEIGHT = 0.1
"""Weight of the newest report in the running mean of the time per step."""
STUCK_STEPS, LONG_STEPS, LONG_S_MIN = 10.0, 3.0, 2.0
"""A loop that reports nothing for longer than `STUCK_S_MIN`, and than so many usual steps, hangs in
user code; one that takes `LONG_STEPS` straggles."""


class Looping(Service[Need]):
    """Serves `NextData`, `Gradient` and `Done`, and by `Engines` the loop's own optimiser."""

    def __init__(
        self,
        links: Links,
        terms: WorkTerms,
        accounts: Accounts,
        writing: Writing,
        side: ReplicaSide,
        averaged: m.Array,
        *,
        has_own_data: bool = False,
    ) -> None:
        """averaged: float64[n], the model's buffers. has_own_data: a lease gives the loop no data;
        it counts a portion's samples, or a few more.
        """
        self.context, self.identity = links.context, links.identity
        self.accounts, self.portions = accounts, accounts.portions
        self.writing, self.side = writing, side
        self.own_rate = terms.own_rate
        self.averaged = averaged
        self.draining = self.holds = False
        self.leasing = Leasing(self.context, self.identity, self.portions)
        self.reports = PortionReports(self.context, self.identity, accounts, writing)
        self.engines = Engines(self.context, self.is_held)
        self.losses = Losses()
        self._has_own_data = has_own_data
        self._uncounted: list[LoopStep] = []
        """Steps on own data that no lease counts yet."""
        self._left: dict[tuple[int, int], int] = {}
        """Portion that is not delivered completely -> its samples that are not."""
        self._made: deque[Step | None] = deque()
        """What the loop has computed and the method has not taken; None: it was unusable."""
        self._lent: Gradient | None = None
        """The need for which the model is lent; None: the role has it."""
        self._is_recalled = False
        self._is_dry = False
        """The loop has returned the model because it has no data."""
        self._is_waited_for = False
        """The loop waits for data, with the model in its hands or not."""
        self._is_told_of_end = False
        """The method was notified that there is no data, because the replica leaves."""
        self._announced: tuple[int, int] | None = None
        """The portion that `NextData` has announced a step in; but what is left may be too little
        for the loop, and the loop may skip its steps."""
        self._has_left = False
        """The loop takes neither the model nor data any more."""
        self._heard_at = 0.0
        """When the loop has reported last, or got the model."""
        self.step_s = 0.0
        """Time per step, smoothed; 0: unknown yet."""
        self._need: Need | None = None

    # ------------------------------------------------------------ the source of steps

    def services(self) -> Mapping[type[Need], Service[Any]]:
        return {
            **dict.fromkeys((NextData, Gradient, Done), self),
            **dict.fromkeys((OwnStep, OwnState), self.engines),
        }

    def on_event(self, event: Event, now: float) -> None:
        match event:
            case LoopStepped():
                self._on_stepped(event, now)
                self.side.step_s = self.step_s
            case DataWanted(is_waited_for) if not self.draining:
                self._is_waited_for |= is_waited_for
                (self.leasing.request if is_waited_for else self.leasing.request_ahead)(now)
            case LoopLeft():
                self._has_left = True
            case EngineRan():
                self.engines.on_ran(event, now)

    def on_lease(self, lease: m.Lease, now: float) -> None:
        there_is_none = self.leasing.on_lease(lease, now)
        self._give(now)
        if there_is_none:
            self._is_waited_for = False
            if self._lent is not None or self._left:
                # What is begun must not wait for more; nor must less than a batch that is left.
                self._is_dry = self.leasing.none_now = False
                self.context.do(GiveData(None))
        elif self._is_waited_for and not self.draining:
            self.leasing.request(now)  # The answer was to a request in advance.

    def acted(self) -> None:
        self.leasing.told_no_data = False
        self._made.clear()  # The method has turned away from them: they have led nowhere.

    def has_ended(self) -> bool:
        return self._is_told_of_end and self._ends_here()

    def is_computing(self) -> bool:
        return self._lent is not None

    def is_at_work(self) -> bool:
        return self._lent is not None or self.engines.is_at_work

    def recall(self) -> None:
        if self._lent is not None and not self._is_recalled:
            self._is_recalled = True
            self.context.do(RecallModel())

    def can_stop(self) -> bool:
        """A training loop of the user's own makes its steps to their end."""
        return False

    def stop(self) -> None:
        """It cannot."""

    def drain(self) -> None:
        if not self.draining:
            self.draining, self._is_dry = True, False  # What is begun is finished with less.
            self.context.do(GiveData(None, ends=True))
            self.recall()

    def is_held(self) -> bool:
        """Whether no step may begin because the replica's state is about to be saved."""
        is_amid = self.side.is_in_step or self.writing.has_unpushed_steps()
        return self.holds and not is_amid

    # ------------------------------------------------------------ the service

    def begin(self, need: Need, now: float) -> None:
        self._need = need

    def poll(self, now: float) -> tuple[bool, Any]:
        match self._need:
            case Gradient() as need:
                return self._gradient(need, now)
            case Done(but):
                self.reports.done_without_push(but, now)
                return True, None
            case _:
                return self._next_data(now)

    def phase(self) -> Phase:
        if self._lent is not None:
            return Phase("computing")
        return Phase("saving" if self.is_held() else "waiting for data")

    def deadline(self) -> float | None:
        return self.leasing.ask_again_at

    def _gradient(self, need: Gradient, now: float) -> tuple[bool, Step | None]:
        if self._made:
            return True, self._made.popleft()
        if self._lent is not None:
            return False, None
        if self._announced is not None and next(iter(self._left), None) != self._announced:
            self._announced = None  # All that was left of it was skipped.
            return True, None
        done, data = self._find_data(now)
        if data is None:
            if done and self._announced is not None:
                # The method expects to be notified where it asks for data.
                self._announced = None
                self.leasing.told_no_data = self._is_told_of_end = False
                self.leasing.none_now = not self.draining
            return done, None
        if not self.is_held():
            self._lend(need, now)
        return False, None

    def _next_data(self, now: float) -> tuple[bool, NextBatch | None]:
        if self._made:
            return True, self._batch()
        if self._lent is not None:
            return False, None
        done, data = self._find_data(now)
        self._announced = None if data is None else (data.data_epoch, data.portion)
        return done, data

    def _find_data(self, now: float) -> tuple[bool, NextBatch | None]:
        """(whether this is an answer for the method, the data that comes next if there is any)."""
        if self._ends_here():
            # The first time the method can still push its accrued gradients; then it is parked.
            is_first, self._is_told_of_end = not self._is_told_of_end, True
            if self._has_own_data:
                self._finish_begun(now)
            return is_first, None
        if self.holds and self.writing.is_in_parts():
            return True, None  # A save must contain all steps completely.
        if self._left and not self._is_dry:
            return True, self._batch()
        return self.leasing.wait(now), None

    def _batch(self) -> NextBatch:
        """The portion that the next step begins in, as far as it is known here."""
        data_epoch, portion = next(iter(self._left), (0, 0))
        return NextBatch(data_epoch, portion, is_last=False)

    def _lend(self, need: Gradient, now: float) -> None:
        self._lent, self._heard_at, self._is_recalled = need, now, False
        progress = self.accounts.progress
        for client in (client for clients in self.writing.tables[:1] for client in clients):
            client.base_version = client.basis.version
        self.context.do(
            LendModel(
                1 + need.more, progress.samples, progress.replicas(), steps_own=need.step,
                gather=need.gather, pull=need.pull, fresh=need.fresh,
            )
        )  # fmt: skip

    # ------------------------------------------------------------ data

    def _give(self, now: float) -> None:
        """Hand what has been leased to the loop."""
        for portion in self.portions.unfinished():
            key = _key(portion)
            if key in self._left:
                continue
            self._left[key] = portion.lease.stop - portion.lease.start
            self._is_dry = self._is_waited_for = False
            if not self._has_own_data:
                self.context.do(GiveData(portion.lease))
        self._count_waiting(now)

    def _ends_here(self) -> bool:
        """Whether this replica leaves, and no portion is partly delivered that the loop goes on
        with.
        """
        if self._has_left:
            return self._lent is None
        if not self.draining or self._has_own_data:
            return self.draining
        whole = (portion.lease.stop - portion.lease.start for portion in self.portions.unfinished())
        return all(
            left == samples for left, samples in zip(self._left.values(), whole, strict=True)
        )

    def _finish_begun(self, now: float) -> None:
        """The loop's own data ends anywhere: what is counted in a portion is all of it."""
        for portion in self.portions.unfinished():
            left = self._left[_key(portion)]
            if left < portion.lease.stop - portion.lease.start:
                self._deliver(portion, left, now)

    # ------------------------------------------------------------ what the loop has made

    def _on_stepped(self, event: LoopStepped, now: float) -> None:
        assert self._lent is not None, "the loop has stepped a model that it did not have"
        took_s, self._heard_at = now - self._heard_at, now
        need, each_s = self._lent, took_s / max(len(event.steps), 1)
        if event.steps:
            self.step_s += (STEP_WEIGHT if self.step_s else 1.0) * (each_s - self.step_s)
        for step in event.steps:
            is_usable = self._is_usable(step, event, need)
            if is_usable:
                self.accounts.step_made(self.writing.steps, step.samples, each_s, _in_words(step))
                self.writing.steps += 1
                self.losses.follow(step.loss, step.metrics)
            elif not step.is_skipped:
                self._refuse(step, event)
            self._count(step, now, is_usable=is_usable)
            if is_usable or not step.is_skipped:
                made = Step(event.gradient, step.samples, _known(step.loss), event.norm)
                self._made.append(made if is_usable else None)
                self._announced = None
        self.averaged = event.averaged
        if event.returns:
            self._lent, self._is_dry = None, event.is_dry

    def _is_usable(self, step: LoopStep, event: LoopStepped, need: Gradient) -> bool:
        if step.is_skipped or (step.loss is not None and not math.isfinite(step.loss)):
            return False
        return not need.gather or event.norm <= self.accounts.bad_gradients.norm_max(None)

    def _refuse(self, step: LoopStep, event: LoopStepped) -> None:
        """The method is notified that there is no such step: a NaN would stay for ever."""
        is_loss = step.loss is not None and not math.isfinite(step.loss)
        what = f"loss {step.loss}" if is_loss else f"gradient of norm {event.norm:.6g}"
        self.accounts.bad_gradients.discard(f"{what}, {_in_words(step)}")
        self.accounts.bad_gradients.note(self.context)

    def _count(self, step: LoopStep, now: float, *, is_usable: bool) -> None:
        """Count a step, and what was delivered to it, in the portions that the samples are of."""
        if self._has_own_data:
            self._count_own(step if is_usable else LoopStep(0), now)
            return
        portions = {_key(portion): portion for portion in self.portions.unfinished()}
        for number, (data_epoch, portion, start, stop) in enumerate(step.pieces):
            mine = portions[data_epoch, portion]
            if is_usable:
                loss, counts = _known(step.loss), int(number == 0)
                self.portions.count(Counted(mine, stop - start, loss, step.metrics, counts))
            self._deliver(mine, stop - start, now)

    def _count_own(self, step: LoopStep, now: float) -> None:
        """In the first portion that is open; without one, when there is one."""
        if step.samples:
            self._uncounted.append(step)
        self._count_waiting(now)
        if len(self._left) < 2 and not self.draining:
            self.leasing.request_ahead(now)

    def _count_waiting(self, now: float) -> None:
        """All in one portion, however many: a lease takes a while, and steps of any size do not."""
        mine = next(iter(self.portions.unfinished()), None)
        if mine is None or not self._uncounted:
            return
        for step in self._uncounted:
            self.portions.count(Counted(mine, step.samples, _known(step.loss), step.metrics, 1))
        samples, self._uncounted = sum(step.samples for step in self._uncounted), []
        self._deliver(mine, samples, now)

    def _deliver(self, portion: Portion, samples: int, now: float) -> None:
        """Samples of a portion are in steps. It is computed with the last of them."""
        key = _key(portion)
        self._left[key] -= samples
        if self._left[key] > 0:
            return
        del self._left[key]
        self.reports.computed(portion, now)

    def on_done(self, done: list[Portion], now: float) -> None:
        self.reports.done(done, now)

    # ------------------------------------------------------------ figures and time

    def metrics(self, now: float) -> dict[str, Any]:
        return {**self.losses.metrics(), "request": self.leasing.number}

    def paused(self, now: float) -> None:
        """An evaluation is running from now on."""
        self._heard_at = now

    def stuck_s(self, now: float, *, evaluates: bool) -> float:
        """How long the loop has reported nothing, or evaluates, if far too long, else 0. An
        evaluation is the script's own, and may take long: until its time is over it is none.
        """
        took_s = now - self._heard_at if self._lent is not None or evaluates else 0.0
        if evaluates:
            return took_s if took_s > EVALUATE_S_MAX else 0.0
        if took_s > max(STUCK_S_MIN, STUCK_STEPS * self.step_s):
            return took_s
        return self.engines.stuck_s(now)

    def long_s(self, now: float) -> float:
        took_s = now - self._heard_at if self._lent is not None else 0.0
        return took_s if took_s > max(LONG_S_MIN, LONG_STEPS * self.step_s) else 0.0


def _key(portion: Portion) -> tuple[int, int]:
    return portion.lease.data_epoch, portion.lease.portion


def _known(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _in_words(step: LoopStep) -> str:
    """A step, for messages."""
    places = [f"samples {p.start}..{p.stop - 1} of epoch {p.data_epoch}" for p in step.pieces]
    return ", ".join(places) or f"a step of the loop with {step.samples} samples"
