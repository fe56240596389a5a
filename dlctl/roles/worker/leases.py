"""A worker's data: how it leases portions, processes them batch by batch, and which are done.

A portion is done when all its gradients are in settled pushes, not when they were computed: the
unpushed work of a dead worker is leased to another one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dlctl.algorithms.needs import NextBatch
from dlctl.model.flat import slice_bounds
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.limits import METRICS_MAX
from dlctl.roles.worker.shard_client import Identity
from dlctl.wire import messages as m
from dlctl.wire.messages import Lease


class Counted(NamedTuple):
    """A batch that counts as trained, unless its push arrives too late."""

    portion: Portion
    samples: int
    loss: float
    metrics: Mapping[str, float]
    steps: int
    """0: another portion of the same batch counts the step."""


@dataclass(slots=True)
class Portion:
    """A lease in progress."""

    lease: Lease
    batch_size: int
    next_number: int = 0
    steps: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    metric_sums: dict[str, list[float]] = field(default_factory=dict)
    """Further metrics of the task's loss: name -> [sum over samples, samples that have it]."""
    _last: int | None = None
    """The batch in which the stream's shard ended."""
    end: int = -1
    """The samples of the shard, if it ended here."""
    computed_at: int = 0
    """The replica's steps when its last batch was computed."""

    @property
    def batches(self) -> int:
        return self._last + 1 if self._last is not None else self._leased

    @property
    def _leased(self) -> int:
        """Batches of the whole lease."""
        return -(-(self.lease.stop - self.lease.start) // self.batch_size)

    def batch_range(self, number: int) -> tuple[int, int]:
        """The samples [start, stop) of one batch, at most `batch_size` of them."""
        lo, hi = slice_bounds(self.lease.stop - self.lease.start, self._leased, number)
        stop = self.end if number == self._last else self.lease.start + hi
        return self.lease.start + lo, stop

    def in_words(self, number: int) -> str:
        """A batch of this portion in words, for messages."""
        start, stop = self.batch_range(number)
        of = f"shard {self.lease.shard} in" if self.lease.shard >= 0 else "the order of"
        return f"samples {start}..{stop - 1} of {of} epoch {self.lease.data_epoch}"

    def end_in(self, number: int, samples: int) -> None:
        """The stream's shard ended in batch `number`, after `samples` samples of it."""
        start, _ = self.batch_range(number)
        self._last, self.end = number, start + samples

    def is_last(self, number: int) -> bool:
        return number == self.batches - 1

    def count(self, batch: Counted, times: int) -> None:
        """Add a batch with the means of its samples; new metrics up to `METRICS_MAX` names. times:
        1, or -1 to subtract it.
        """
        samples, loss, metrics = batch.samples, batch.loss, batch.metrics
        self.steps += times * batch.steps
        self.samples += times * samples
        self.loss_sum += times * loss * samples
        for name, value in metrics.items():
            if name not in self.metric_sums and len(self.metric_sums) >= METRICS_MAX:
                continue
            sums = self.metric_sums.setdefault(name, [0.0, 0])
            sums[0] += times * value * samples
            sums[1] += times * samples

    def report(self, slot: int, term: int) -> m.PortionDone:
        """That it is done."""
        lease = self.lease
        return m.PortionDone(
            slot, term, lease.data_epoch, lease.portion, self.steps, self.samples, self.loss_sum,
            self.metric_sums, self.end,
        )  # fmt: skip


@dataclass(slots=True)
class Portions:
    batch_size: int
    ahead_s: float
    """Work leased in advance, in seconds: how long a worker continues without the coordinator."""
    current: Portion | None = None
    upcoming: deque[Portion] = field(default_factory=deque)
    _batches_upcoming: int = 0
    """A counter, since it is read at every step, and there may be a thousand short portions."""
    _computed: list[Portion] = field(default_factory=list)
    """All batches computed, not all of them completely in pushes."""
    _counted: list[Counted] = field(default_factory=list)
    """Batches that are in no push."""
    _pushed: dict[int, tuple[list[Portion], list[Counted]]] = field(default_factory=dict)
    """Push number -> the portions that end with it, and the batches in it."""

    def take(self, lease: Lease) -> None:
        """A lease has arrived: begin it, or queue it behind the current one."""
        portion = Portion(lease, self.batch_size)
        if self.current is None:
            self.current = portion
        else:
            self.upcoming.append(portion)
            self._batches_upcoming += portion.batches

    def batches_left(self) -> int:
        """Leased batches that are not begun."""
        current = self.current.batches - self.current.next_number if self.current else 0
        return current + self._batches_upcoming

    def not_done(self) -> int:
        """Portions that are leased or not completely settled."""
        own = len(self.upcoming) + len(self._computed) + (self.current is not None)
        return own + sum(len(portions) for portions, _ in self._pushed.values())

    def wants_more_ahead(self, batch_s: float) -> bool:
        """Whether less than `ahead_s` of work is leased. batch_s: of a batch; 0: unknown."""
        return 0 < self.batches_left() * batch_s < self.ahead_s

    def at_boundary(self) -> bool:
        """Whether no portion is partly done, so that the replica can stop here."""
        return self.current is None or self.current.next_number == 0

    def ahead(self) -> NextBatch | None:
        """The data of the next batch, if there is one."""
        if self.current is None:
            return None
        lease, number = self.current.lease, self.current.next_number
        return NextBatch(lease.data_epoch, lease.portion, self.current.is_last(number), number)

    def batches_ahead(self, count: int) -> tuple[Portion, int, int]:
        """(portion, number of the first batch in it, how many); requires a batch ahead."""
        assert self.current is not None
        number = self.current.next_number
        return self.current, number, min(count, self.current.batches - number)

    def next_batches(self, count: int) -> tuple[Portion, int, int]:
        """The next `count` batches, as in `batches_ahead`; advances past them."""
        portion, number, count = self.batches_ahead(count)
        portion.next_number += count
        return portion, number, count

    def unfinished(self) -> list[Portion]:
        """The portions that are leased and not computed, in order."""
        return [*filter(None, (self.current,)), *self.upcoming]

    def count(self, batch: Counted) -> None:
        """A batch was computed and is usable."""
        batch.portion.count(batch, 1)
        self._counted.append(batch)

    def finish(self, portion: Portion) -> None:
        """The last batch of the portion was computed (or refused)."""
        self._computed.append(portion)
        if portion is not self.current:
            self.upcoming.remove(portion)
            self._batches_upcoming -= portion.batches
            return
        self.current = self.upcoming.popleft() if self.upcoming else None
        self._batches_upcoming -= self.current.batches if self.current else 0

    def pushed(self, number: int, steps: int) -> None:
        """Push `number` contains the batches that are in no push, or parts of them; with it the
        first `steps` of the replica are completely in pushes.
        """
        portions, counted = self._pushed.setdefault(number, ([], []))
        portions += self._take_done(steps)
        counted += self._counted
        self._counted = []

    def done_now(self, steps: int, but: int) -> list[Portion]:
        """The computed portions in the first `steps` of the replica that are in no push: they are
        done without one. but: number of newer steps.
        """
        self._counted = self._counted[-but:] if but else []
        return self._take_done(steps)

    def refused(self, number: int) -> None:
        """A shard has refused push `number`: the portions that end with it are not in all shards,
        and their loss becomes infinite. A method that needs the gradient of a whole batch treats
        that as a step too far.
        """
        for portion in self._pushed.get(number, ([], []))[0]:
            portion.loss_sum = math.inf

    def late(self, number: int) -> None:
        """All shards have dropped push `number`: its batches were not trained."""
        for batch in self._pushed.get(number, ([], []))[1]:
            batch.portion.count(batch, -1)

    def _take_done(self, steps: int) -> list[Portion]:
        """Remove the computed portions in the first `steps` of the replica."""
        computed = self._computed
        self._computed = [portion for portion in computed if portion.computed_at > steps]
        return [portion for portion in computed if portion.computed_at <= steps]

    def settled(self, number: int) -> list[Portion]:
        """Push `number` is settled on every shard; returns the portions done with it."""
        return self._pushed.pop(number, ([], []))[0]


IDLE_S = 0.2
"""Interval between two requests for data while there is none."""


class Leasing:
    """Requests data when there is none, and some time in advance.

    At most one request is in flight. A request in advance may be refused, to leave data for the
    other workers; it is then retried after `IDLE_S`.
    """

    def __init__(self, context: Context, identity: Identity, portions: Portions) -> None:
        self.context = context
        self.identity = identity
        self.portions = portions
        self.told_no_data = False
        """The method was notified that there is none, and has pushed its work."""
        self.ask_again_at: float | None = None
        """When to ask for data again, while there is none."""
        self.number = 0
        """The number of the newest request for data."""
        self._is_ahead = False
        """The newest request was for work in advance."""
        self._ahead_at = 0.0
        self.none_now = False
        """The newest request has found that there is none, and the method is not notified yet."""
        self._ends: list[int] = []
        """The next value of `LeaseRequest.ends`."""

    def ended(self, portion: Portion) -> None:
        """Report the end of the shard with the next request: the coordinator then leases nothing
        behind it, even if the portion itself is done later.
        """
        self._ends += (portion.lease.data_epoch, portion.lease.shard, portion.end)

    def look_ahead(self, batch_s: float, now: float) -> None:
        """A batch is being computed: request more data if little is left."""
        if not self.portions.batches_left():
            self.request(now)
        elif self.portions.wants_more_ahead(batch_s):
            self.request_ahead(now)

    def wait(self, now: float) -> bool:
        """There is nothing to compute. True if the method has to be notified of it."""
        if self.none_now:
            self.none_now = False
            if not self.told_no_data:
                self.told_no_data = True
                return True
            self.ask_again_at = now + IDLE_S
        if self.ask_again_at is None or now >= self.ask_again_at:
            self.ask_again_at = None
            self.request(now)
        return False

    def request_ahead(self, now: float) -> None:
        """Data will be needed soon."""
        if now >= self._ahead_at:
            self._request(True, now)

    def request(self, now: float) -> None:
        """Data is needed now."""
        self._request(False, now)

    def _request(self, ahead: bool, now: float) -> None:
        if "lease" not in self.context.retries:
            self.number += 1
            self._is_ahead = ahead
            me = self.identity
            ends, self._ends = self._ends, []
            request = m.LeaseRequest(me.slot, me.term, self.number, ahead, tuple(ends))
            self.context.ask("lease", COORDINATOR, request, now)

    def on_lease(self, lease: m.Lease, now: float) -> bool:
        """Take the answer to the newest request; a stale one is dropped. Returns whether data is
        needed now, and there is none.
        """
        if lease.request != self.number or self.context.retries.done("lease", now) is None:
            return False
        if lease.start < lease.stop:
            self.told_no_data, self.ask_again_at = False, None
            self.portions.take(lease)
        elif self._is_ahead:
            # If data is needed by now, `wait` requests it, and that is not refused.
            self._ahead_at = now + IDLE_S
        else:
            self.none_now = self.portions.current is None
            return True
        return False
