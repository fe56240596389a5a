"""Ringleader ASGD. Maranjyan, Richtarik, "Ringleader ASGD: The First Asynchronous SGD with Optimal
Time Complexity under Data Heterogeneity", ICLR 2026.

Asynchronous SGD for workers whose data differ: all have equal weights in every update, however fast
they are. A shard has a table with the gradients of each worker, their sum G_i and their number b_i,
and makes updates by the mean of the workers' means. Rounds bound the age of the gradients:

    worker i:  x_i = x, whenever an update was made with its push;  push grad_i(x_i, ...), again
               and again
    shard:     phase 1:  G_i += g_i, b_i += 1, until there is something of all n workers: then the
                         first update
               phase 2:  G_i += g_i, b_i += 1, and an update, once for each other worker; later
                         pushes of workers that have had theirs are for the next round, in G+, b+
               update:   x -= gamma * (1/n) sum_i G_i / b_i
               round over:  G, b = G+, b+;  G+, b+ = 0

So each worker makes one update in a round of n, and no gradient in the table is older than 2n - 2
updates. This was derived from the abstract of the paper and from accounts of it (the table, rounds
with one update of each worker, the bound), and not from its text: where it begins, and which
gradients of a round are in which of its updates, may differ.

Where the paper says nothing:

- A round does not wait for workers that have died, or have no data. Their gradients count until the
  round is over. It waits for a worker that joins at once. If it waits for no worker, the next push
  makes the update.
- The table is slots of the shard, two for each of the job's workers, and the counts are counters: a
  gradient in it is in the commit that acknowledges its push. An update reads and writes all vectors
  of a shard, so its memory and time grow with the number of workers, which should be small. Workers
  that `dlctl scale` has added share the entries of others.
- Gradients in the table at the end of a run that were in no update are only in its last checkpoint.
- Each shard has its own rounds. A worker reads all shards when any has made an update with its
  push.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dlctl.algorithms.base import Method, Needs, PushOutcome, ReplicaSide, ShardSide
from dlctl.algorithms.needs import Gradient, NextData, Read, Receipt, Write
from dlctl.algorithms.roster import Roster
from dlctl.compress.base import Delta
from dlctl.optim.base import Optimizer
from dlctl.optim.blocks import Block, Rule
from dlctl.optim.wrapping import Wrapping, keep
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, BUFFERED, Json

ENTRY, AHEAD, UPDATES, ENDS = "entry", "ahead", "updates_now", "ends"
"""Counters set for an update: the entry of the push; 1 if it is for the next round; 1 if an update
is made with it; 1 if the round is over then."""
REMEMBERED = 1000
"""Updates, to determine the age of a gradient."""


@dataclass(slots=True, kw_only=True)
class Options:
    pass


class Replica(ReplicaSide):
    def changes_parameters(self) -> bool:
        return False

    def run(self) -> Needs:
        is_at_point = is_idle = False
        """Whether to continue with the current parameters; whether the replica has reported idle.
        """
        while True:
            if (yield NextData()) is None:
                if not is_idle:
                    yield Write(vector=None)
                is_idle, is_at_point = True, False
                continue
            is_idle = False
            if not is_at_point:
                yield Read(wait=True, after_own=True)
            computed = yield Gradient()
            is_at_point = False
            if computed is not None:
                self.residual += computed.gradient
                receipt: Receipt = yield Write(
                    vector=self.residual, samples=computed.samples, wait=True
                )
                is_at_point = set(receipt.outcomes.values()) == {BUFFERED}


class Tabled(Wrapping):
    """An optimiser behind a table of the workers' mean gradients."""

    def __init__(self, inner: Optimizer, workers: int) -> None:
        self.workers = workers
        self._now = [f"now{entry}" for entry in range(workers)]
        self._next = [f"next{entry}" for entry in range(workers)]
        table = dict.fromkeys((*self._now, *self._next), 0)
        own = table | dict.fromkeys((ENTRY, AHEAD, UPDATES, ENDS), 0)
        super().__init__(inner, table, own)

    def numbers(self) -> list[int]:
        """How many gradients each entry of this round has, then each entry of the next."""
        return [self.counters[name] for name in (*self._now, *self._next)]

    def begin_update(self) -> Rule:
        counters = self.counters
        names = self._next if counters[AHEAD] else self._now
        counters[names[counters[ENTRY]]] += 1
        at = counters[ENTRY] + self.workers * counters[AHEAD]
        numbers, ends = self.numbers()[: self.workers], bool(counters[ENDS])
        step = self.inner.begin_update() if counters[UPDATES] else None
        if ends:
            for now, following in zip(self._now, self._next, strict=True):
                counters[now], counters[following] = counters[following], 0
        if step is None:
            return lambda blocks: _exhaust(self._added(blocks, at, ends))
        return lambda blocks: step(self._means(blocks, at, numbers, ends=ends))

    def _added(self, blocks: Iterable[Block], at: int, ends: bool) -> Iterator[Block]:
        """Blocks that add the gradient to the table; all else is unchanged."""
        for block in blocks:
            present = (block.w, *block.slots)
            for array, following in zip(present, (block.w_next, *block.slots_next), strict=True):
                keep(array, following)
            table = block.slots_next[len(block.slots) - 2 * self.workers :]
            table[at][:] += block.g
            yield block
            if ends:
                for now, following in zip(table, table[self.workers :], strict=False):
                    now[:] = following
                    following[:] = 0

    def _means(
        self, blocks: Iterable[Block], at: int, numbers: list[int], *, ends: bool
    ) -> Iterator[Block]:
        """Blocks for the optimiser: their gradient is the mean of the workers' means."""
        inner, workers = len(self.slots) - 2 * self.workers, sum(map(bool, numbers))
        for block in self._added(blocks, at, ends):
            mean = np.zeros_like(block.g)
            for summed, number in zip(block.slots_next[inner:], numbers, strict=False):
                if number:
                    mean += summed * np.float32(1 / (workers * number))
            yield block._replace(
                g=mean, slots=block.slots[:inner], slots_next=block.slots_next[:inner]
            )


def _exhaust(blocks: Iterator[Block]) -> None:
    for _ in blocks:
        pass


class RingleaderServer(ShardSide):
    def __init__(self, options: Options, shard: Shard) -> None:
        super().__init__(options, shard)
        assert isinstance(shard.optimizer, Tabled)
        self._table = shard.optimizer
        self.roster = Roster(newcomers=0)
        """A round waits for all that have data, also for those that join."""
        self._updated: set[int] = set()
        """Entries that have had their update in this round; none: phase 1."""
        self._versions: deque[int] = deque(maxlen=REMEMBERED)
        """The versions of the newest updates."""

    @classmethod
    def optimizer(cls, options: Options, optimizer: Optimizer, workers: int) -> Optimizer:
        return Tabled(optimizer, workers)

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        if not push.samples:
            self.roster.rest(push.slot)
            return [push.outcome(APPLIED)]
        self.roster.count(push.slot, 0)
        entry = push.slot % self._table.workers
        updates, ahead = self._is_update(entry), entry in self._updated
        if updates:
            self._updated.add(entry)
        ends = bool(self._updated) and self._waited_for() <= self._updated
        staleness = len(self._versions) - bisect_right(self._versions, push.base_version)
        counters = {ENTRY: entry, AHEAD: int(ahead), UPDATES: int(updates), ENDS: int(ends)}
        self.shard.apply(delta, push.samples, counters=counters)
        if updates:
            self._versions.append(self.shard.version)
        if ends:
            self._updated = set()
        kind = APPLIED if updates else BUFFERED
        return [push.outcome(kind, staleness)]

    def _is_update(self, entry: int) -> bool:
        """Whether the next push into this entry makes an update."""
        if self._updated:
            return entry not in self._updated
        numbers = islice(self._table.numbers(), self._table.workers)
        there = {other for other, number in enumerate(numbers) if number} | {entry}
        return self._waited_for() <= there

    def _waited_for(self) -> set[int]:
        return {slot % self._table.workers for slot in self.roster.counted()}

    def joined(self, slot: int) -> list[PushOutcome]:
        self.roster.join(slot, is_under_way=True)
        return []

    def members(self, slots: frozenset[int]) -> list[PushOutcome]:
        self.roster.meet(slots, 0)
        return []

    def state(self) -> Json:
        return {"updated": sorted(self._updated), **self.roster.state()}

    def resume(self, state: Json) -> None:
        self._updated = set(state["updated"])
        self.roster.resume(state)

    def restore(self, state: Json) -> None:
        self._updated = set(state["updated"])


RINGLEADER = Method(Options=Options, replica=Replica, shard=RingleaderServer)
