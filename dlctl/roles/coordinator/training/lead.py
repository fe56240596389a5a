"""The lead of the run's method: who may work now, when a data epoch is over, how it has gone on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from dlctl.algorithms.base import Lead
from dlctl.records.memory import Entry, LeadState, Memory
from dlctl.roles.coordinator.members.daemon_states import ENDED, QUARANTINED
from dlctl.roles.coordinator.members.membership import Membership
from dlctl.roles.coordinator.pools.data_pool import DataPool
from dlctl.roles.coordinator.pools.portions import PortionPool
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.training.driven import Driven
from dlctl.roles.protocol.authz import WORKER
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer
from dlctl.wire.messages import Json

OUT = ENDED | {QUARANTINED}
"""States of workers that take no part any more: what was set for them counts no more."""


class _LiveOptions:
    """The options of a method, with those that were set for all its workers."""

    def __init__(self, options: Any, live: Collection[str], members: Membership) -> None:
        self._options = options
        self._live = live
        self._members = members

    def __getattr__(self, name: str) -> Any:
        of_job = getattr(self._options, name)
        if name not in self._live:
            return of_job
        workers = [w for w in self._members.of_role(WORKER) if w.state not in OUT]
        found = {worker.settings.get(name, of_job) for worker in workers}
        # Else some workers have a value of their own, or were added after it was set.
        return found.pop() if len(found) == 1 else of_job


class MethodLead:
    def __init__(self, run: RunState) -> None:
        options = run.algorithm.Options(**run.job.algorithm.options)
        live = run.algorithm.lead.live
        known = _LiveOptions(options, live, run.members) if live else options
        self.side: Lead = run.algorithm.lead(run.algorithm.without_live(known, live))
        self.cuts_epochs = self.side.cuts_epochs
        self.without_data = run.division.without_data
        """The slots that never lease any."""
        self.driven: Driven | None = None
        """The method, if the coordinator drives it."""
        if self.side.portions == "batch":
            tables, servers = run.algorithm.shape.tables_of(options), run.job.servers.count
            self.driven = Driven(run.context, self.side, tables, servers)
        self._pool: PortionPool | None = None
        """The pool whose data epochs the lead ends."""
        self._slots: tuple[int, ...] = ()
        """`members` of the lead, as they were given."""

    # ------------------------------------------------------------ who may work

    def may_lease(self, slot: int, first_slot: int) -> str:
        """Why `slot` has to wait; "" if it may work now. first_slot: the lowest that is alive."""
        return self.side.may_lease(slot, first_slot)

    def in_turn(self, slots: list[int]) -> Iterable[int]:
        """The slots that wait for data, in the order in which they are served."""
        return self.side.in_turn(slots)

    def follow_work(self, pool: DataPool) -> None:
        """Tell a lead whose workers take turns which of them have portions."""
        if self.side.takes_turns:
            self.side.at_work = frozenset(pool.holders.leased.values())

    def on_done(self, done: m.PortionDone, steps: int) -> None:
        """A portion is done, for the first time. steps: of the run, with those of the portion."""
        self.side.steps_done = steps
        self.side.portion_done(done.slot, done.steps, done.samples, done.data_epoch)
        if self.driven is not None:
            self.driven.on_portion(done)

    def failed(self) -> str:
        """Why the method cannot continue; "" if it can."""
        return self.driven.failed if self.driven is not None else ""

    # ------------------------------------------------------------ data epochs

    def follow(self, pool: PortionPool) -> None:
        """Follow the data epochs of a new pool: the dataset is cut into portions."""
        self._pool = pool

    def end_epochs(self, slots: tuple[int, ...]) -> None:
        """Drop the rest of the data epochs that the method has ended, with returned portions.
        slots: of the workers that take part.
        """
        if not self.cuts_epochs or self._pool is None:
            return
        if slots is not self._slots:
            self._slots, self.side.members = slots, frozenset(slots)
        self.update_epoch()
        while self.side.epoch.portions and self.side.cut_epoch():
            self.side.data_epoch += 1
            self.update_epoch()
        self._pool.drop(before=self.side.data_epoch)

    def update_epoch(self) -> None:
        """Update the data epoch of a method that ends its epochs: a portion was leased or done."""
        if self.cuts_epochs and self._pool is not None:
            self.side.epoch = self._pool.standing(self.side.data_epoch)

    # ------------------------------------------------------------ a method that is driven

    def begin(self) -> None:
        """The workers train: start or resume a method that the coordinator drives."""
        if self.driven is not None:
            self.driven.begin()

    def advance(self, now: float) -> bool:
        """Let a driven method make its next request, if one is waiting; False: it is not driven."""
        return self.driven is not None and self.driven.advance(now)

    def on_vector_result(self, peer: Peer, result: m.VectorResult, now: float) -> None:
        if self.driven is not None:
            self.driven.on_result(result, now)

    # ------------------------------------------------------------ persisted state

    def restore(self, saved: Json) -> None:
        """Restore the lead from a checkpoint's manifest."""
        self.side.steps_done = saved.get("steps", 0)
        if "lead" in saved:
            self._resume(LeadState(*saved["lead"]))

    def _resume(self, lead: LeadState) -> None:
        self.side.clock = lead.clock
        self.side.resume(lead.state)
        if self.driven is not None:
            self.driven.journal = lead.journal

    def to_json(self) -> Json:
        """The lead's state, for a checkpoint's manifest."""
        journaled = (self.side.state(), {}) if self.driven is None else self.driven.journaled()
        return {LeadState.KEY: LeadState(self.side.clock, *journaled).to_json()}

    def changes(self) -> Iterator[Entry]:
        """The state is the method's own: whether it has changed is seen only by comparing it."""
        yield from (Entry(key, value) for key, value in self.to_json().items())

    def recall(self, memory: Memory, now: float) -> None:
        self.side.steps_done = memory.work.steps
        if lead := memory.piece(LeadState):
            self._resume(lead)
