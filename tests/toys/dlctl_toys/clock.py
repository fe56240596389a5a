"""toy-clock: no replica gets more than `staleness` steps ahead of the slowest (as in SSP, Ho 2013).

    replica, at its clock c:  read w, once the servers' clock is at least c - staleness
                              push the gradient; c += 1; begin to read what there is by now
    shard:                    apply at once; its clock is the least of all members' clocks

It guards clocks in replies, reads that wait, members on the shards, and a method's state there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from dlctl import messages
from dlctl.algorithms.base import Lead, Method, Needs, PushOutcome, ReplicaSide, ShardSide
from dlctl.algorithms.needs import Gradient, NextData, Read, View, Write
from dlctl.compress.base import Delta
from dlctl.messages import APPLIED, Json
from dlctl.settings import Setting, count

IDLE = 2**40
"""The clock of a replica without data: nobody waits for it."""


@dataclass(slots=True, kw_only=True)
class Options:
    staleness: Annotated[int, Ge(1)] = 1
    """Steps that a replica may be ahead of the slowest one. Changes live."""


class Replica(ReplicaSide):
    options: Options

    def changes_parameters(self) -> bool:
        return False

    def run(self) -> Needs:
        clock, is_idle = 0, False
        while True:
            data = yield NextData()
            if data is None and not is_idle:
                yield Write(vector=None, clock=IDLE)
            is_idle = data is None
            if is_idle:
                continue
            at_least = max(0, clock - self.options.staleness)
            view: View = yield Read(wait=True, at_least=at_least, after_own=True)
            assert view.clock_min >= at_least, f"{view} at clock {clock}"
            slowest = 0 if view.clock_min >= IDLE else view.clock_min
            clock = max(clock, slowest)
            computed = yield Gradient()
            if computed is None:
                continue
            self.residual += computed.gradient
            clock += 1
            yield Write(vector=self.residual, samples=computed.samples, clock=clock)
            yield Read(wait=False)


class Clocks(ShardSide):
    def __init__(self, options: Options, shard: object) -> None:
        super().__init__(options, shard)  # type: ignore[arg-type]
        self._clocks: dict[int, int] = {}
        self._members: frozenset[int] = frozenset()

    def clock(self) -> int:
        return min((self._clocks.get(slot, 0) for slot in self._members), default=0)

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        staleness = max(0, self.shard.version - push.base_version)
        self._clocks[push.slot] = push.clock
        if push.samples:  # Else it only says that nobody has to wait for this replica.
            self.shard.apply(delta, push.samples)
        return [push.outcome(APPLIED, staleness)]

    def joined(self, slot: int) -> list[PushOutcome]:
        """Whoever joins begins with the slowest; nobody has to wait for what it never did."""
        others = [c for other, c in self._clocks.items() if other != slot]
        self._clocks[slot] = min((c for c in others if c < IDLE), default=0)
        return []

    def members(self, slots: frozenset[int]) -> list[PushOutcome]:
        self._members = slots
        return []

    def state(self) -> Json:
        return {"clocks": sorted(map(list, self._clocks.items()))}

    def resume(self, state: Json) -> None:
        self._clocks = dict(state.get("clocks", []))


class Counting(Lead):
    """Its clock counts portions, its state whose they were."""

    def __post_init__(self) -> None:
        self._done: Counter[int] = Counter()

    def portion_done(self, slot: int, steps: int, samples: int, data_epoch: int) -> None:
        self.clock += 1
        self._done[slot] += 1

    def state(self) -> Json:
        return {"done": sorted(map(list, self._done.items()))}

    def resume(self, state: Json) -> None:
        self._done = Counter(dict(state["done"]))

    def figures(self) -> Json:
        return {"portions": self.clock, "of": {f"worker-{s}": n for s, n in self._done.items()}}


CLOCK = Method(
    Options=Options,
    replica=Replica,
    shard=Clocks,
    lead=Counting,
    live={"staleness": Setting(help="steps ahead of the slowest replica", parse=count)},
)
