"""Groups of replicas in virtual time: what `daemons/worker/group.py` does with gloo.

A sum is finished when every member has asked for it. If one dies before that, the others hear of it
soon, or after the time that they wait at most. Now and then a sum ends for some and fails for the
others, as when a member dies while the result is on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dlctl.roles.protocol.effects import (
    GroupFailed,
    GroupJoined,
    JoinGroup,
    OpenStore,
    Reduce,
    Reduced,
    StoreOpened,
)
from dlctl.sim.process import Process

LATENCY_S = 0.01
NOTICED_S = 0.2
"""From a member's death to the others' hearing of it."""
JOINS = -1


@dataclass(slots=True)
class _Generation:
    size: int
    members: dict[int, GroupDriver] = field(default_factory=dict)
    """Rank -> who has joined."""
    asked: dict[int, Reduce] = field(default_factory=dict)
    is_broken: bool = False


@dataclass(slots=True)
class Groups:
    """All groups of a simulated run."""

    rng: np.random.Generator
    torn: float = 0.0
    """The part of all sums that end for some members only."""
    generations: dict[int, _Generation] = field(default_factory=dict)


class GroupDriver:
    """One worker's thread for its group."""

    def __init__(self, process: Process, groups: Groups) -> None:
        self.process = process
        self.groups = groups
        self.finished = JOINS
        self.last: Reduced | None = None
        self._generation = 0
        self._rank = 0
        process.perform(OpenStore, self._open)
        process.perform(JoinGroup, self._join)
        process.perform(Reduce, self._reduce)

    def _open(self, effect: OpenStore) -> None:
        address = f"sim-group:{effect.generation}"
        self.process.post(StoreOpened(effect.generation, address), LATENCY_S)

    def _join(self, effect: JoinGroup) -> None:
        self._leave()
        self._generation, self._rank = effect.generation, effect.rank
        group = self.groups.generations.setdefault(effect.generation, _Generation(effect.size))
        group.members[effect.rank] = self
        self._fail_later(effect.generation, effect.timeout_s, lambda: not self._is_whole(group))
        if self._is_whole(group):
            self._all_are_there(effect.generation, group)

    @staticmethod
    def _is_whole(group: _Generation) -> bool:
        return len(group.members) == group.size

    def _all_are_there(self, generation: int, group: _Generation) -> None:
        """The newest sum is known to all of them from here on."""
        known = [member.finished for member in group.members.values()]
        newest, is_first = max(0, *known), set(known) == {JOINS}
        last = next((d.last for d in group.members.values() if d.finished == newest), None)
        for driver in group.members.values():
            own, driver.finished = driver.finished, newest
            is_late, rejoins = own == newest - 1 > JOINS, JOINS < own < newest - 1
            if is_late:
                driver.last = last
            missed = last if is_late else None
            joined = GroupJoined(generation, newest, missed, is_first, rejoins)
            driver.process.post(joined, LATENCY_S)

    def _leave(self) -> None:
        """Whoever still waits for this member in its old group hears that it is gone."""
        group = self.groups.generations.get(self._generation)
        if group is not None and not group.is_broken:
            self._break(self._generation, group)

    def _break(self, generation: int, group: _Generation) -> None:
        group.is_broken = True
        for driver in group.members.values():
            if driver is not self and driver._generation == generation:
                failed = GroupFailed(generation, "a member has closed its connection")
                driver.process.post(failed, NOTICED_S)

    def _fail_later(self, generation: int, after_s: float, is_waiting: Callable[[], bool]) -> None:
        def look() -> None:
            alive = self.process.alive and self._generation == generation
            if alive and is_waiting():
                self.process.post(GroupFailed(generation, "a member has not come in time"))

        timeline = self.process.timeline
        timeline.at(timeline.now + after_s, look)

    def _reduce(self, effect: Reduce) -> None:
        group = self.groups.generations.get(effect.generation)
        if group is None or group.is_broken or effect.generation != self._generation:
            failed = GroupFailed(effect.generation, "the group is not there any more")
            self.process.post(failed, LATENCY_S)
            return
        number = self.finished + 1
        group.asked[self._rank] = effect
        self._fail_later(
            effect.generation, 6.0, lambda: self.finished < number and not group.is_broken
        )
        dead = [d for d in group.members.values() if not d.process.alive]
        if dead:
            self._break(effect.generation, group)
            failed = GroupFailed(effect.generation, "a member has closed its connection")
            self.process.post(failed, NOTICED_S)
        elif len(group.asked) == group.size:
            self._sum(effect.generation, group)

    def _sum(self, generation: int, group: _Generation) -> None:
        asked, group.asked = group.asked, {}
        step = max(effect.step for effect in asked.values())
        total, weight = np.zeros_like(asked[0].vector), 0.0
        for rank in sorted(asked):
            counts = asked[rank].weight if asked[rank].step == step else 0.0
            total += np.float32(counts) * asked[rank].vector
            weight += counts
        joined = sum(effect.joins for effect in asked.values())
        torn = self.groups.rng.random() < self.groups.torn
        without = int(self.groups.rng.integers(group.size)) if torn else -1
        for rank, driver in group.members.items():
            if rank == without and group.size > 1:
                failed = GroupFailed(generation, "the connection broke")
                driver.process.post(failed, NOTICED_S)
                continue
            driver.finished += 1
            driver.last = Reduced(
                generation, driver.finished, total.copy(), weight, group.size, step, joined
            )
            driver.process.post(driver.last, LATENCY_S)
        group.is_broken = torn
