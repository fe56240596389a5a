"""EASGD in which the servers compute the pull: one round trip, and exactly symmetric.

In Elastic averaging SGD (`easgd.py`) a replica reads the centre x~ and pushes back a part e of its
distance from it. Other replicas may have moved the centre by then, so e is stale. Here the replica
sends its position, and the servers answer with e:

    every tau steps:  push x
                      shard:  e = alpha (x - x~);  x~ = x~ + e;  the reply is e
                      read e
    g = gradient at x                       # before the pull, as in EASGD
    x = x - eta g
    every tau steps:  x = x - e

This is no method of a paper; rules, names and defaults are those of `easgd.py`. It costs one round
trip for an exchange instead of one and a half, and a vector on the servers for each worker.

- e is computed once, from the pushed position and the centre of that moment, and is in the commit
  that acknowledges the push: even if daemons die, a replica subtracts exactly what was added to the
  centre.
- A replica that begins, or has diverged, adopts the centre as its position: its push changes
  nothing then, and the reply is the centre.
- There are as many of these vectors as the job has workers. The positions of more workers, which
  `dlctl scale` has added, are refused.
- Positions are neither compressed nor rounded.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np

from dlctl.algorithms.base import (
    Fault,
    Method,
    Needs,
    PushKind,
    PushOutcome,
    ReplicaSide,
    Shape,
    ShardSide,
    Start,
)
from dlctl.algorithms.methods import easgd
from dlctl.algorithms.needs import Gradient, NextData, Read, Receipt, Settle, Write
from dlctl.algorithms.rounds import Discards
from dlctl.compress.base import Delta
from dlctl.job.config import Choice, JobFile
from dlctl.model.vector import Vector, copy_of, is_finite
from dlctl.optim.base import Optimizer
from dlctl.optim.blocks import Block, Rule
from dlctl.optim.wrapping import Wrapping, keep
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, Array, Json

WORKER, ALPHA = "worker", "alpha"
"""Counters: the slot of the push; alpha in units of 1 / `UNIT`, 0: it adopts the centre."""
UNIT = 2**24
Trip = Generator[Read | Write | Settle, Any, bool]


class Replica(ReplicaSide):
    keeps_position = True
    options: easgd.Options

    @classmethod
    def one_push(cls, options: easgd.Options) -> PushKind:
        return PushKind(options.exchange_every_steps, is_displacement=True, is_all=False)

    def begin(self, start: Start) -> None:
        self.residual = self.residual[:0]
        self.position = easgd.Position(self)
        self.arrival = self._answer = easgd.Beside(self, self.position)

    def state(self) -> dict[str, Vector]:
        return self.position.state()

    def restore(self, state: Mapping[str, Array]) -> None:
        self.position.restore(state)

    def run(self) -> Needs:
        samples, discards, position = 0, Discards(), self.position
        while True:
            data = yield NextData()
            if data is not None and (not position.is_known or discards.is_diverged):
                yield from self._take_centre()
                samples, discards = 0, Discards()
            is_due = bool(samples) if data is None else position.is_due()
            if is_due:
                if not (yield from self._pulled(samples)):
                    samples = 0
                    if data is None:  # Nothing else would say that its steps do not count.
                        yield from self._take_centre()
                    continue
                samples = position.steps = 0
            if data is not None:
                computed = yield Gradient(step=True, gather=False)
                if not discards.count(computed):
                    samples += computed.samples
                    position.steps += 1
            if is_due:
                self.parameters -= self._answer.pull

    def _pulled(self, samples: int) -> Trip:
        """Send the position and wait for e. Returns whether the centre has moved by it: else this
        replica starts over."""
        if is_finite(self.parameters):
            position = copy_of(self.parameters)
            yield Write(vector=position, samples=samples, weight=easgd.alpha_of(self))
            yield Read(wait=True, after_own=True)
            receipt: Receipt = yield Settle()
            if receipt.is_applied():
                return True
        self.position.is_known = False
        return False

    def _take_centre(self) -> Trip:
        """Give up the position, and the steps that no push holds."""
        self.position.give_up()
        yield Write(vector=None)
        yield Read(wait=True, after_own=True)
        self.position.is_known = True
        return True


def pull_name(slot: int) -> str:
    return f"pull{slot}"


class Elastic(Wrapping):
    """The rule of the centre. `inner` has no part in it."""

    def __init__(self, inner: Optimizer, workers: int) -> None:
        self._own = [pull_name(slot) for slot in range(workers)]
        super().__init__(inner, self._own, {WORKER: 0, ALPHA: 0})

    def begin_update(self) -> Rule:
        name = pull_name(self.counters[WORKER])
        which = self._own.index(name) - len(self._own) if name in self._own else None
        alpha = np.float32(self.counters[ALPHA] / UNIT)
        return lambda blocks: _exchange(blocks, which, alpha)


def _exchange(blocks: Iterable[Block], which: int | None, alpha: np.float32) -> None:
    for block in blocks:
        reply = alpha * (block.g - block.w) if alpha else block.w.copy()
        for slot, following in zip(block.slots, block.slots_next, strict=True):
            keep(slot, following)
        if alpha:
            np.add(block.w, reply, out=block.w_next)
        else:
            keep(block.w, block.w_next)
        if which is not None:
            block.slots_next[which][:] = reply


class Server(ShardSide):
    def __init__(self, options: easgd.Options, shard: Shard) -> None:
        super().__init__(options, shard)
        self._versions: dict[int, int] = {}
        """Slot -> the version that the newest reply to it is of."""

    @classmethod
    def optimizer(cls, options: easgd.Options, optimizer: Optimizer, workers: int) -> Optimizer:
        return Elastic(optimizer, workers)

    def shown(self, slot: int) -> tuple[int, messages.Array] | None:
        if slot not in self._versions:
            return None
        return self._versions[slot], self.shard.slots[pull_name(slot)]

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        alpha = round(min(max(push.weight, 0.0), 1.0) * UNIT) if push.weight == push.weight else 0
        is_known = pull_name(push.slot) in self.shard.slots
        if alpha and not is_known:
            return self.left_out(push, "the job has fewer workers: raise workers.count")
        self.shard.apply(delta, push.samples, counters={WORKER: push.slot, ALPHA: alpha})
        if is_known:
            self._versions[push.slot] = self.shard.version
        return [push.outcome(APPLIED)]

    def joined(self, slot: int) -> list[PushOutcome]:
        self._versions.pop(slot, None)
        return []

    def state(self) -> Json:
        return {"versions": sorted(map(list, self._versions.items()))}

    def resume(self, state: Json) -> None:
        self._versions = dict(state["versions"])


def check(job: JobFile) -> list[Fault]:
    """Conflicting options of the job file."""
    found = easgd.check(job)
    if job.average.ema:
        what = "easgd-atomic has no optimiser on its servers, so no average of its parameters"
        found.append((("average", "ema"), what, "remove [average]"))
    return found


EASGD_ATOMIC = Method(
    Options=easgd.Options,
    replica=Replica,
    shard=Server,
    shape=Shape(exact=True, optimizers=("sgd",)),
    optimizer=Choice(name="sgd", options={"lr": 1.0}),
    inner=easgd.EASGD.inner,
    check=check,
)
