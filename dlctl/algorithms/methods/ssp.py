"""Stale synchronous parallel (SSP). Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NIPS 2013.

Every replica counts clocks: a clock is a number of its steps, whose update it pushes at the end.
None gets more than s clocks ahead of the slowest one. In the paper's words, s = `staleness`, and
w~ is the replica's cache, with the clock r of its newest read:

    replica, at its clock c:   if r < c - s:  read; wait until the servers' clock is c - s
                               clock_steps times:  w~ = inner(w~, grad(w~, next mini-batch))
                               push w_before - w~, stamped c;  c += 1
    shard:                     w = w - push;  its clock is the least of all live replicas' clocks

- A read at clock c contains every update that is stamped c - s - 1 or lower, and those newer ones
  that have arrived. Reads wait, writes do not.
- A replica always sees its own updates: its steps are in its cache, a read waits for the replica's
  own pushes, and the compressor's residual is added to the values that were read.
- s = 0 is bulk-synchronous: all replicas' updates of a clock are added before any replica begins
  the next one. A read may contain more only if it takes longer than another replica's clock. A
  large s is like Downpour.
- Updates are added, as in the paper's tables: the servers' optimiser is SGD with rate 1, and a
  replica steps by any `[inner]` optimiser. With another optimiser on the servers a replica sees its
  own updates as it made them, and not as the servers have applied them, until it reads.

Where the paper says nothing:

- `fetch_every_clocks` reads also when the cache is fresh enough, for fresher values than required.
  A large number is the paper's cache; 1 costs a round trip at every clock.
- Shards are independent, so each has its own clock, which never decreases. A replica whose update
  has nothing for a shard pushes an empty one: it advances the shard's clock.
- A replica that dies, or has no data, is not counted. One that joins, returns or was skipped reads,
  adopts the newest shard's clock, sends it to all shards, and reads again: from then on no shard
  gets further ahead of it than s.
- The clocks are in each commit with the push that moved them, so that a replacement server holds
  replicas back as its predecessor did.
- An update that is not finite is pushed as an empty one, and the replica reads before it continues.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from dlctl import outdated
from dlctl.algorithms.base import (
    Arrival,
    Method,
    Needs,
    PushKind,
    PushOutcome,
    ReplicaSide,
    ShardSide,
    Start,
)
from dlctl.algorithms.needs import NextData, Read, Write
from dlctl.algorithms.roster import IDLE, Roster, absurd
from dlctl.algorithms.rounds import local_steps
from dlctl.compress.base import Delta
from dlctl.job.config import Choice
from dlctl.job.settings import COUNT_MAX, Live
from dlctl.model.vector import copy_of, is_finite
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, Json


@dataclass(slots=True, kw_only=True)
class Options:
    staleness: Live[Annotated[int, Ge(0), Le(COUNT_MAX)]] = 3
    """Clocks that a replica may be ahead of the slowest one, s. 0: bulk-synchronous."""
    clock_steps: Live[Annotated[int, Ge(1), Le(COUNT_MAX)]] = 1
    """Steps of a replica per clock, and per push."""
    fetch_every_clocks: Live[Annotated[int, Ge(1), Le(COUNT_MAX)]] = 1
    """Clocks after which a replica reads even if its cache is fresh enough. A large number: only
    when it is stale."""


class Replica(ReplicaSide):
    options: Options

    @classmethod
    def one_push(cls, options: Options) -> PushKind:
        return PushKind(options.clock_steps, is_displacement=True)

    def begin(self, start: Start) -> None:
        self.clock = 0
        """Clocks that this replica has completed."""
        self.is_counted = False
        """Whether this replica counts on all shards, so that they hold back others for it."""
        self._is_idle = False
        """Whether all shards were notified not to wait for it."""
        self.arrival = self._own = _Own(self)
        self._read_at = -math.inf
        """The clock of the newest read."""

    def run(self) -> Needs:
        while True:
            if (yield NextData()) is None:
                yield from self._rest()
                continue
            if not self.is_counted:
                yield from self._read()
            made = yield from local_steps(self.options.clock_steps)
            if made.is_diverged:
                self._read_at = -math.inf
            if made.samples:
                yield self._update(made.samples)
            elif not made.has_data:  # All were discarded, and this is the only notice of the end.
                yield from self._rest()
                continue
            if self._is_read_due():
                yield from self._read()

    def _rest(self) -> Generator[Write, Any, None]:
        """Without data: no shard waits for this replica, until it counts again."""
        if not self._is_idle:
            self._is_idle, self.is_counted = True, False
            yield Write(vector=None, clock=IDLE)

    def _is_read_due(self) -> bool:
        is_too_old = self.view.clock_min < self.clock - self.options.staleness
        return is_too_old or self.clock - self._read_at >= self.options.fetch_every_clocks

    def _read(self) -> Generator[Read | Write, Any, None]:
        """Read the values required at this clock. If a shard is past it, as it did not count this
        replica, continue from that shard's clock.
        """
        while True:
            at_least = max(0, self.clock - self.options.staleness) if self.is_counted else 0
            view = yield Read(wait=True, at_least=at_least, after_own=True)
            self._read_at = self.clock
            if self.is_counted and view.clock_max <= self.clock:
                return
            self.clock, self.is_counted = max(self.clock, view.clock_max), True
            self._is_idle = False
            yield Write(vector=None, clock=self.clock)

    def _update(self, samples: int) -> Write:
        """The update of this clock: its steps plus the residual. If that is not finite it is
        discarded; a residual that is itself not finite was restored from a checkpoint like this.
        """
        self.clock += 1
        self._own.base -= self.parameters
        self._own.base += self.residual
        if not is_finite(self._own.base):
            if not is_finite(self.residual):
                self.residual[:] = 0
            self._read_at = -math.inf
            return Write(vector=None, clock=self.clock)
        self.residual[:] = self._own.base
        self._own.base[:] = self.parameters
        return Write(vector=self.residual, samples=samples, clock=self.clock)


class _Own(Arrival):
    """A replica always sees its own updates: the residual is added to the values that were read."""

    def __init__(self, side: ReplicaSide) -> None:
        self.side = side
        self.base = copy_of(side.parameters)
        """The parameters before the steps that no push holds."""

    def after(self, lo: int, hi: int) -> None:
        self.side.parameters[lo:hi] -= self.side.residual[lo:hi]
        self.base[lo:hi] = self.side.parameters[lo:hi]


class Clocks(ShardSide):
    """Applies at once, and answers a read when the slowest replica is far enough."""

    def __init__(self, options: Options, shard: Shard) -> None:
        super().__init__(options, shard)
        self.roster = Roster()
        self._clock = 0
        """The clock of this shard, which never decreases: the least clock of all slots that count.
        """
        self._waiting: dict[int, int] = {}
        """Slot -> the clock that its read waits for."""

    def clock(self) -> int:
        return self._clock

    def may_read(self, slot: int, at_least: int) -> bool:
        if self._clock < at_least:
            self._waiting[slot] = at_least
            return False
        self._waiting.pop(slot, None)
        return True

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        if reason := self._absurd(push):
            return super().left_out(push, reason)
        staleness = max(0, self.shard.version - push.base_version)
        if push.samples:
            self.shard.apply(delta, push.samples)
        self._count(push)
        return [push.outcome(APPLIED, staleness)]

    def left_out(self, push: messages.Push, reason: str) -> list[PushOutcome]:
        if not self._absurd(push):
            self._count(push)
        return super().left_out(push, reason)

    def _absurd(self, push: messages.Push) -> str:
        return "" if push.clock == IDLE else absurd(push, self._clock)

    def _count(self, push: messages.Push) -> None:
        """A replica has completed so many clocks, or has no data."""
        if push.clock == IDLE:
            self.roster.rest(push.slot)
        else:
            self.roster.count(push.slot, max(push.clock, self._clock))
        self._clock = self.roster.slowest(self._clock)

    def joined(self, slot: int) -> list[PushOutcome]:
        self.roster.join(slot, is_under_way=self.shard.version > 0 or self._clock > 0)
        self._waiting.pop(slot, None)
        self._clock = self.roster.slowest(self._clock)
        return []

    def members(self, slots: frozenset[int]) -> list[PushOutcome]:
        self.roster.meet(slots, self._clock)
        self._waiting = {slot: clock for slot, clock in self._waiting.items() if slot in slots}
        self._clock = self.roster.slowest(self._clock)
        return []

    def waits_for(self) -> frozenset[int]:
        wanted = min(self._waiting.values(), default=0)
        return frozenset(slot for slot, clock in self.roster.counted().items() if clock < wanted)

    def state(self) -> Json:
        return {"clock": self._clock, **self.roster.state()}

    def resume(self, state: Json) -> None:
        self._clock = state["clock"]
        self.roster.resume(state)

    def restore(self, state: Json) -> None:
        self._clock = state["clock"]


SSP = Method(
    Options=Options,
    replica=Replica,
    shard=Clocks,
    optimizer=Choice(name="sgd", options={"lr": 1.0}),
    inner=Choice(name="sgd", options={"lr": 0.01}),
)


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
