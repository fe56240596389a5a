"""Groups of replicas in virtual time: what `daemons/worker/replica_group.py` does with gloo.

A sum begins when every member has requested it, and is returned when every member has stored it. If
a member dies in between, or is stopped, the others are notified soon, or at their timeout; by then
some have stored the result, and some have not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from dlctl.compress import bfloat16
from dlctl.errors import DlctlError
from dlctl.roles.protocol.effects import (
    GroupFailed,
    GroupJoined,
    GroupWaits,
    JoinGroup,
    LeaveGroup,
    OpenStore,
    Reduce,
    Reduced,
    StoreOpened,
    TaskFailed,
)
from dlctl.roles.worker.services.sums import Claim, ModelLost, SumRecords, plan_of, row_of
from dlctl.sim.process import Process
from dlctl.wire import messages as m

Do = Callable[[], None]
LATENCY_S = 0.01
NOTICED_S = 0.2
"""From a member's death in a sum to the notification of the others."""
WORD_S = 1.0
"""Interval between two reports of the members that a member waits for."""


def _rounded(vector: m.Array, dtype: str) -> m.Array:
    """float32[d], rounded to this dtype."""
    if dtype == "bfloat16":
        return bfloat16.decode(bfloat16.encode(vector))
    return vector.astype(dtype).astype(np.float32)


@dataclass(slots=True)
class _Generation:
    number: int
    size: int
    timeout_s: float
    members: dict[int, GroupDriver] = field(default_factory=dict)
    """Rank -> the driver of the member that has joined."""
    asked: dict[int, Reduce] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    sums: int = 0
    """Sums that have begun, after all members have requested them."""
    is_broken: bool = False


class SumCosts(Protocol):
    """How long a sum takes its members, in place of a random short delay."""

    def transfer(self, process: Process, nbytes: int, members: int, do: Do) -> None:
        """Call `do` when this member has the sum, after all have requested it."""
        ...

    def finish(self, process: Process, do: Do) -> None:
        """Call `do` when this member knows that all have it."""
        ...


@dataclass(slots=True)
class SimGroups:
    """All groups of a simulated run."""

    rng: np.random.Generator
    torn: float = 0.0
    """Fraction of all sums, and joins, that complete for some members only."""
    generations: dict[int, _Generation] = field(default_factory=dict)
    costs: SumCosts | None = None

    def is_torn(self) -> bool:
        return bool(self.rng.random() < self.torn)


class GroupDriver:
    """One worker's threads for its group."""

    def __init__(self, process: Process, groups: SimGroups) -> None:
        self.process = process
        self.groups = groups
        self.records = SumRecords()
        self._group: _Generation | None = None
        self._rank = 0
        process.perform(OpenStore, self._open)
        process.perform(JoinGroup, self._join)
        process.perform(Reduce, self._reduce)
        process.perform(LeaveGroup, self._leave)

    def _open(self, effect: OpenStore) -> None:
        self._group = None
        address = f"sim-group-{effect.generation}:1"
        self.process.post(StoreOpened(effect.generation, address), LATENCY_S)

    def _leave(self, effect: LeaveGroup) -> None:
        self._group = None

    def is_in(self, group: _Generation) -> bool:
        return self._group is group and self.process.alive

    def _soon(self, group: _Generation, do: Callable[[], None]) -> None:
        """After a random short delay, unless there is another generation then."""
        delay_s = LATENCY_S * (0.5 + float(self.groups.rng.random()))
        self._later(group, delay_s, do)

    def _later(self, group: _Generation, delay_s: float, do: Callable[[], None]) -> None:
        self.process.timeline.after(delay_s, lambda: do() if self.is_in(group) else None)

    # ------------------------------------------------------------ joining

    def _join(self, effect: JoinGroup) -> None:
        made = _Generation(effect.generation, effect.size, effect.timeout_s)
        group = self.groups.generations.setdefault(effect.generation, made)
        self._group, self._rank = group, effect.rank
        group.members[effect.rank] = self

        def look() -> None:
            if len(group.members) < group.size:
                self._fail(group, "a member has not come in time", m.UNMADE)

        self._later(group, effect.timeout_s, look)
        if len(group.members) == group.size:
            self._all_are_there(group)

    def _all_are_there(self, group: _Generation) -> None:
        drivers = group.members.values()
        claims = [driver.records.claim() for driver in drivers]
        without = self._one_of(group) if self.groups.is_torn() else None
        for rank, driver in group.members.items():
            if rank == without:
                driver._fail_later(group, NOTICED_S, why=m.UNMADE)
            else:
                driver._soon(group, partial(driver._agree, group, claims))

    def _one_of(self, group: _Generation) -> int:
        return int(self.groups.rng.integers(group.size))

    def _agree(self, group: _Generation, claims: list[Claim]) -> None:
        try:
            agreed = self.records.agree(claims)
        except DlctlError as error:
            self.process.last_lines.append(error.message)
            self.process.end(error.exit_code)
            return
        self.process.post(GroupJoined(group.number, *agreed))

    # ------------------------------------------------------------ summing

    def _reduce(self, effect: Reduce) -> None:
        group = self._group
        if group is None or group.is_broken or effect.generation != group.number:
            failed = GroupFailed(effect.generation, "the group is not there any more")
            self.process.post(failed, LATENCY_S)
            return
        group.asked[self._rank] = effect
        self._report_waiting(group, group.sums)
        if len(group.asked) == group.size:
            self._sum(group)

    def _report_waiting(self, group: _Generation, sums: int) -> None:
        def look() -> None:
            if group.sums == sums and not group.is_broken:
                missing = tuple(r for r in range(group.size) if r not in group.asked)
                self.process.post(GroupWaits(group.number, missing))
                self._report_waiting(group, sums)

        self._later(group, WORD_S, look)

    def _sum(self, group: _Generation) -> None:
        asked, group.asked, group.kept = group.asked, {}, set()
        group.sums += 1
        effects = [asked[rank] for rank in range(group.size)]
        try:
            plan = plan_of([row_of(effect) for effect in effects])
        except ModelLost as error:
            for driver in group.members.values():
                driver._fail_later(group, LATENCY_S, error.message, m.MODEL_LOST)
            return
        except DlctlError as error:
            for driver in group.members.values():
                driver.process.post(TaskFailed(error.message, ""))
            return
        total = np.zeros(plan.size, np.float32)
        weights = sum(plan.weights) if plan.dtype != "float32" else 1.0
        for weight, effect in zip(plan.weights, effects, strict=True):
            if weight:
                total += _rounded(np.float32(weight / weights) * effect.vector, plan.dtype)
        total = _rounded(total, plan.dtype) * np.float32(weights)
        total.flags.writeable = False
        result = Reduced(
            group.number, 0, total, sum(plan.weights), group.size, plan.step, plan.joined, True,
            plan.current, plan.beside,
        )  # fmt: skip
        without = self._one_of(group) if self.groups.is_torn() and group.size > 1 else None
        for rank, driver in group.members.items():
            effect = asked[rank]
            is_counted = not effect.joins and effect.step == plan.step
            own = replace(result, is_counted=is_counted)
            driver._begin(group, own, is_without=rank == without)

    def _begin(self, group: _Generation, result: Reduced, *, is_without: bool) -> None:
        """Store the result after a delay, or fail. A member that is dead or gone does neither."""

        looked = False

        def look() -> None:
            nonlocal looked
            looked = True
            is_here = self.is_in(group) and not self.process.frozen and not is_without
            if group.is_broken:
                return
            if not is_here:
                group.is_broken = True
                limit_s = group.timeout_s if self.process.frozen else NOTICED_S
                for driver in group.members.values():
                    driver._fail_later(group, limit_s)
                return
            self.records.keep(result)
            group.kept.add(self._rank)
            if len(group.kept) == group.size:
                self._deliver_to_all(group)

        if self.groups.costs is not None:
            nbytes = 0 if result.vector is None else result.vector.nbytes
            self.groups.costs.transfer(self.process, nbytes, group.size, look)
            self._watch(lambda: looked, look)
            return
        delay_s = LATENCY_S * (0.5 + float(self.groups.rng.random()))
        self.process.timeline.after(delay_s, look)

    def _watch(self, has_looked: Callable[[], bool], look: Callable[[], None]) -> None:
        """The threads of a dead process do nothing any more: the others notice it all the same."""

        def check() -> None:
            if has_looked():
                return
            if self.process.alive:
                self._watch(has_looked, look)
            else:
                look()

        self.process.timeline.after(NOTICED_S, check)

    def _deliver_to_all(self, group: _Generation) -> None:
        """Or to all but one, which learns in the next generation that the sum counts."""
        without = self._one_of(group) if self.groups.is_torn() and group.size > 1 else None
        for rank, driver in group.members.items():
            if rank == without:
                driver._fail_later(group, NOTICED_S)
            elif self.groups.costs is None:
                driver._soon(group, driver._deliver)
            else:
                self.groups.costs.finish(driver.process, partial(driver._deliver_in, group))

    def _deliver_in(self, group: _Generation) -> None:
        if self.is_in(group):
            self._deliver()

    def _deliver(self) -> None:
        self.process.post(self.records.deliver())

    def _fail_later(
        self, group: _Generation, after_s: float, reason: str = "a member is gone", why: str = ""
    ) -> None:
        self._later(group, after_s, lambda: self._fail(group, reason, why))

    def _fail(self, group: _Generation, reason: str, why: str) -> None:
        group.is_broken, self._group = True, None
        self.process.post(GroupFailed(group.number, reason, why))
