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

from dlctl.algorithms.base import Lead, Method, Needs, PushOutcome, ReplicaSide, ShardSide
from dlctl.algorithms.needs import NextData, Read, View, Write
from dlctl.algorithms.roster import IDLE, Roster, absurd
from dlctl.algorithms.stepwise import accrue
from dlctl.compress.base import Delta
from dlctl.job.settings import Live
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, Json


@dataclass(slots=True, kw_only=True)
class Options:
    staleness: Live[Annotated[int, Ge(1)]] = 1
    """Steps that a replica may be ahead of the slowest one."""


class Replica(ReplicaSide):
    options: Options

    def changes_parameters(self) -> bool:
        return False

    def run(self) -> Needs:
        clock, is_idle = 0, False
        while True:
            if (yield NextData()) is None:
                if not is_idle:
                    yield Write(vector=None, clock=IDLE)
                is_idle = True
                continue
            at_least = 0 if is_idle else max(0, clock - self.options.staleness)
            is_idle = False
            view: View = yield Read(wait=True, at_least=at_least, after_own=True)
            assert view.clock_min >= at_least, f"{view} at clock {clock}"
            clock = max(clock, view.clock_min)
            if samples := (yield from accrue(self)):
                clock += 1
                yield self.write_residual(samples=samples, clock=clock)
                yield Read(wait=False)


class Clocks(ShardSide):
    def __init__(self, options: Options, shard: Shard) -> None:
        super().__init__(options, shard)
        self.roster = Roster()
        self._clock = 0

    def clock(self) -> int:
        return self._clock

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        is_idle = push.clock == IDLE
        if not is_idle and (why := absurd(push, self._clock)):
            return self.left_out(push, why)
        if push.samples:
            self.shard.apply(delta, push.samples)
        if is_idle:
            self.roster.rest(push.slot)
        else:
            self.roster.count(push.slot, push.clock)
        self._clock = self.roster.slowest(self._clock)
        return [push.outcome(APPLIED)]

    def joined(self, slot: int) -> list[PushOutcome]:
        self.roster.count(slot, self._clock)  # It is waited for at once.
        return []

    def members(self, slots: frozenset[int]) -> list[PushOutcome]:
        self.roster.meet(slots, self._clock)
        self._clock = self.roster.slowest(self._clock)
        return []

    def state(self) -> Json:
        return {"clock": self._clock, **self.roster.state()}

    def resume(self, state: Json) -> None:
        self._clock = state["clock"]
        self.roster.resume(state)


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
)
