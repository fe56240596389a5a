"""Leases: requests for data and their answers, what is given back, and what is settled, once.

A worker is known by what it says: a request, a report, that a portion is done. Nothing depends on
when it says so, on how many portions it has, or on the order in which it finishes them: a loop that
asks on demand is served like one that prefetches.

- A request has a number. It is answered once; if it is repeated, its answer is. A newer request
  supersedes one that still waits.
- A portion is settled when its pushes are acknowledged on all shards and its holder says so
  (`PortionDone`). The first report of a holder counts, every other one changes nothing.
- What a dead worker had is leased again. So is what a live worker is on record with and does not
  have; its report that it is done counts all the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlctl.errors import RemoteProtocolError
from dlctl.job import batches
from dlctl.records.memory import ANSWER, Entry, Memory
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.pools.data_pool import UNKNOWN, Range
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.training.lead import MethodLead
from dlctl.roles.coordinator.training.run_progress import RunProgress
from dlctl.roles.coordinator.training.supply import DataSupply
from dlctl.wire import messages as m

NOTHING = Range(0, 0, 0, 0)
"""The answer to a worker for which there is no data now."""


class Leases:
    def __init__(
        self, run: RunState, data: DataSupply, lead: MethodLead, progress: RunProgress
    ) -> None:
        self.run = run
        self.data = data
        self.lead = lead
        self.progress = progress
        self._without = run.division.without_data
        """The slots that ask for data and never get any."""
        self.answered: dict[int, m.Lease] = {}
        """Slot -> its newest lease, in case its request is resent."""
        self._changed: set[int] = set()
        """Slots whose newest lease has changed."""
        self._waiting: dict[int, m.LeaseRequest] = {}
        """Slot -> its newest request, until that is answered."""

    # ------------------------------------------------------------ requests

    def on_request(self, request: m.LeaseRequest, now: float) -> None:
        answered = self.answered.get(request.slot)
        if answered is not None and request.request <= answered.request:
            # Resent, or overtaken by a newer request: then the worker does not need the answer.
            if request.request == answered.request:
                self.run.context.send(f"worker-{request.slot}", answered)
            return
        self._waiting[request.slot] = request
        if self.data.is_open and request.slot not in self._without:
            for at in range(0, len(request.ends) - 2, 3):
                self.data.pool.on_end(request.slot, *request.ends[at : at + 3])
            self.data.pool.wait(request.slot)
        self.grant(now)

    def grant(self, now: float) -> None:
        """Answer the workers that wait for data and may train now."""
        if self.run.released_at is None:
            return
        if self.lead.cuts_epochs:
            self.lead.end_epochs(self.run.members.live_slots())
        if self.run.shutdown is not None:
            for slot in list(self._waiting):
                self._answer(slot, NOTHING)
            return
        if self._waiting:
            self._queue()
            if not self.run.lacking():
                self._serve(now)
        if self.data.is_open and (news := self.data.pool.news()):
            self.run.context.event("stream", "", news)

    def _queue(self) -> None:
        """The pool has to know of requests that came before it was there."""
        waiting = self._waiting.keys() - self._without
        if len(waiting) > self.data.pool.count_waiting():
            for slot in self._waiting:
                if slot in waiting:
                    self.data.pool.wait(slot)

    def _serve(self, now: float) -> None:
        pool, slots = self.data.pool, self.run.members.live_slots()
        for slot in () if pool.is_dry(now) else self.lead.in_turn(pool.able()):
            if self._has_to_wait(slot, slots):
                if self.lead.cuts_epochs:
                    # It has had its share; an empty lease makes it push what it has accumulated.
                    self._answer(slot, NOTHING)
                continue
            too_much = self._waiting[slot].ahead and not pool.may_prefetch(slot, len(slots))
            taken = (None if too_much else pool.take(slot, now)) or pool.backup(slot, now)
            if taken is not None or not pool.keeps_waiting:
                self._answer(slot, taken or NOTHING)
                self.lead.update_epoch()
            elif pool.is_dry(now):
                return

    def _answer(self, slot: int, taken: Range) -> None:
        request = self._waiting.pop(slot)
        if self.data.is_open:
            self.data.pool.wait_no_more(slot)
        lease = m.Lease(
            request.request, taken.portion, taken.data_epoch, taken.start, taken.stop,
            self.progress.samples, taken.shard,
        )  # fmt: skip
        self.answered[slot] = lease
        self._changed.add(slot)
        self.run.context.send(f"worker-{slot}", lease)

    def backup_due(self) -> float | None:
        """When a worker that waits for data gets a backup copy, if nothing else happens before."""
        is_served = self.data.is_open and not self.run.lacking()
        due = self.data.pool.backup_due() if is_served else None
        idle = self.data.pool.idle() if due is not None else []
        slots = self.run.members.live_slots() if idle else ()
        return due if any(not self._has_to_wait(slot, slots) for slot in idle) else None

    def held_back(self, now: float) -> str:
        """Why workers wait although there is data, or will be; "" if no worker waits."""
        if lacking := self.run.lacking():
            return lacking
        if self.lead.driven is not None and self.lead.driven.has_begun:
            return self.lead.driven.waits_for(now)
        slots = self.run.members.live_slots()
        waiting = (slot for slot in self._waiting if slot not in self._without)
        reasons = (self._has_to_wait(slot, slots) for slot in waiting)
        return next((reason for reason in reasons if reason), "")

    def _has_to_wait(self, slot: int, slots: tuple[int, ...]) -> str:
        """Why the method lets it wait; "" if it does not. slots: all that live, in order."""
        if self.data.is_open:
            self.lead.follow_work(self.data.pool)
        return self.lead.may_lease(slot, slots[0] if slots else 0)

    # ------------------------------------------------------------ what is given back

    def gone(self, slot: int, now: float) -> int:
        """The worker of a slot has died. Returns the number of portions to lease again."""
        self._waiting.pop(slot, None)
        self.answered.pop(slot, None)
        self._changed.add(slot)
        if not self.data.is_open:
            return 0
        self.data.pool.wait_no_more(slot)
        back = self.data.pool.give_back(slot)
        self.grant(now)
        return len(back)

    def on_report(self, worker: Daemon, now: float) -> None:
        """Portions that are on record as leased to a worker that has none are leased again. It has
        none if it reports that, and had received no portion in answer to its newest request.

        A coordinator that could not write to the database may have been notified that the portion
        is done, or may have answered the same request with another portion.
        """
        slot, metrics = worker.index, worker.metrics
        newest = self._waiting.get(slot) or self.answered.get(slot)
        is_sent = isinstance(newest, m.Lease) and newest.start < newest.stop
        if newest is None or is_sent or metrics.get("request") != newest.request:
            return
        has_none = metrics.get("portions") == 0 and self.data.is_open
        if has_none and self.data.pool.holds(slot) and self.data.pool.give_back(slot, lives=True):
            self.grant(now)

    # ------------------------------------------------------------ what is settled

    def settle(self, done: m.PortionDone, now: float) -> None:
        """Count steps and samples once per portion. Raises RemoteProtocolError if the worker
        reports more of them than the portion has, or that the stream ends elsewhere.
        """
        key = done.data_epoch, done.portion
        if not self.data.is_open or not self.data.pool.may_finish(done.slot, *key):
            return
        self._check(done)
        self.data.pool.finish(*key, now, done.end)
        self.progress.count(done)
        self.lead.on_done(done, self.progress.steps)
        self.grant(now)

    def _check(self, done: m.PortionDone) -> None:
        samples = self.data.pool.most(done.portion)
        steps = -(-samples // batches.smallest(self.run.job))
        if done.steps > steps or done.samples > samples:
            said = f"{done.steps} steps and {done.samples} samples"
            raise RemoteProtocolError(f"{said} of a portion of {steps} and {samples}")
        if done.end != UNKNOWN:
            self.data.pool.check_end(done.data_epoch, done.portion, done.end)

    # ------------------------------------------------------------ persisted state

    def changes(self) -> Iterator[Entry]:
        changed, self._changed = self._changed, set()
        for slot in sorted(changed):
            yield Entry(f"{ANSWER}{slot}", _row(self.answered.get(slot)))

    def recall(self, memory: Memory, now: float) -> None:
        for slot, row in memory.under(ANSWER):
            self.answered[int(slot)] = m.Lease(*row)


def _row(lease: m.Lease | None) -> tuple[int, ...] | None:
    """The fields of a lease message, except its samples: they only say how far the run was."""
    if lease is None:
        return None
    where = lease.portion, lease.data_epoch, lease.start, lease.stop
    return lease.request, *where, 0, lease.shard
