"""DC-ASGD. Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation",
ICML 2017, Alg. 1 and 2.

A gradient is computed at the parameters that its worker m has read, w_bak(m), and applied to newer
ones, w. The gradient at w is estimated by the first term of a Taylor series, in which g o g stands
for the second derivatives (o: element by element). In the paper's words, lambda_0 = `lambda_0`, m
of the mean square = `mean_square_decay`, and eta is the rate of the servers' optimiser:

    worker m:  read w;  push grad(w, next mini-batch)
    shard:     on g_m:   w -= eta * (g_m + lambda * g_m o g_m o (w - w_bak(m)))
               m reads:  w_bak(m) = w

    constant:  lambda = lambda_0
    adaptive:  MeanSquare = m * MeanSquare + (1 - m) * g_m o g_m
               lambda = lambda_0 / sqrt(MeanSquare + eps)                       eps = 1e-7

The correction applies to the gradient before the servers' optimiser; with SGD it is the paper's
rule.

Where this differs from the paper, or the paper says nothing:

- A push and the read after it are atomic: w_bak(m) is w right after m's own push, and m then reads
  exactly that, even if other pushes have arrived in between. So the copy is in the commit that
  acknowledges the push, and is bit-identical to the worker's parameters, even if daemons die. A
  worker that begins, or resumes after a while, first pushes an empty update, which takes its copy.
- The copies are slots of the shard: they survive it, and are in its checkpoints. There are as many
  as the job has workers. An update reads and writes all vectors of a shard, so its memory and time
  grow with the number of workers, which should be small. A worker that `dlctl scale` has added
  beyond the job's count has no copy, and its gradients are not corrected.
- An update is of all elements, even by a sparse push, and a worker fetches whole slices.
- The default of `lambda_0` is for "constant"; for "adaptive" the paper's are about 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Lt

from dlctl.algorithms.base import Fault, Method, Needs, PushOutcome, ReplicaSide, ShardSide
from dlctl.algorithms.needs import Gradient, NextData, Read, Write
from dlctl.compress.base import Delta
from dlctl.job.config import JobFile
from dlctl.optim.base import Optimizer
from dlctl.optim.blocks import Block, Rule
from dlctl.optim.wrapping import Wrapping, keep
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, Array, Json

EPS = np.float32(1e-7)
MEAN_SQUARE = "mean_square"
WORKER, TAKES = "worker", "takes"
"""Counters: the slot of the push; 1 if it only takes its copy."""


@dataclass(slots=True, kw_only=True)
class Options:
    variance: Literal["constant", "adaptive"] = "constant"
    """How lambda is computed: it is `lambda_0`, or that over the root of a mean square."""
    lambda_0: Annotated[float, Ge(0)] = 0.04
    """Strength of the correction; 0: none, as Downpour."""
    mean_square_decay: Annotated[float, Ge(0), Lt(1)] = 0.95
    """With "adaptive": decay of the mean square per gradient."""


class Replica(ReplicaSide):
    def changes_parameters(self) -> bool:
        return False

    def run(self) -> Needs:
        is_new = False
        """Whether the copy is the state right after a push."""
        while True:
            if (yield NextData()) is None:
                is_new = False
                continue
            if not is_new:
                yield Write(vector=None)
            yield Read(wait=True, after_own=True)
            computed = yield Gradient()
            is_new = computed is not None
            if computed is not None:
                self.residual += computed.gradient
                yield Write(vector=self.residual, samples=computed.samples)


def copy_name(slot: int) -> str:
    return f"copy{slot}"


class Compensated(Wrapping):
    """The correction before an optimiser; the workers' copies are slots after the optimiser's."""

    def __init__(
        self, inner: Optimizer, workers: int, lambda_0: float, decay: float | None
    ) -> None:
        """decay: of the mean square; None: lambda is constant."""
        self._lambda_0 = np.float32(lambda_0)
        self._decay = None if decay is None else np.float32(decay)
        self._own = [] if decay is None else [MEAN_SQUARE]
        self._own += [copy_name(slot) for slot in range(workers)]
        super().__init__(inner, self._own, {WORKER: 0, TAKES: 0})

    def begin_update(self) -> Rule:
        name = copy_name(self.counters[WORKER])
        which = self._own.index(name) if name in self._own else None
        if self.counters[TAKES]:
            return lambda blocks: self._take(blocks, which)
        step = self.inner.begin_update()
        return lambda blocks: step(self._compensated(blocks, which))

    def _take(self, blocks: Iterable[Block], which: int | None) -> None:
        for block in blocks:
            present = (block.w, *block.slots)
            for array, following in zip(present, (block.w_next, *block.slots_next), strict=True):
                keep(array, following)
            if which is not None:
                block.slots_next[which - len(self._own)][:] = block.w

    def _compensated(self, blocks: Iterable[Block], which: int | None) -> Iterator[Block]:
        """Blocks for the optimiser, with the gradient as it would be at w."""
        inner = len(self.slots) - len(self._own)
        for block in blocks:
            own, own_next = block.slots[inner:], block.slots_next[inner:]
            for array, following in zip(own, own_next, strict=True):
                keep(array, following)
            g = block.g
            strength = self._strength(g, own_next)
            if which is not None:
                g = g + strength * g * g * (block.w - own[which])
            yield block._replace(
                g=g, slots=block.slots[:inner], slots_next=block.slots_next[:inner]
            )
            if which is not None:
                own_next[which][:] = block.w_next

    def _strength(self, g: Array, own_next: tuple[Array, ...]) -> Any:
        """lambda; the mean square is brought up to date."""
        if self._decay is None:
            return self._lambda_0
        mean_square = own_next[0]
        mean_square *= self._decay
        mean_square += (1 - self._decay) * g * g
        return self._lambda_0 / np.sqrt(mean_square + EPS)


class Server(ShardSide):
    def __init__(self, options: Options, shard: Shard) -> None:
        super().__init__(options, shard)
        self._versions: dict[int, int] = {}
        """Slot -> the version that its copy is of."""

    @classmethod
    def optimizer(cls, options: Options, optimizer: Optimizer, workers: int) -> Optimizer:
        is_constant = options.variance == "constant"
        decay = None if is_constant else options.mean_square_decay
        return Compensated(optimizer, workers, options.lambda_0, decay)

    def shown(self, slot: int) -> tuple[int, Array] | None:
        if slot not in self._versions:
            return None
        return self._versions[slot], self.shard.slots[copy_name(slot)]

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        staleness = max(0, self.shard.version - push.base_version) if push.samples else 0
        counters = {WORKER: push.slot, TAKES: int(not push.samples)}
        self.shard.apply(delta, push.samples, counters=counters)
        if copy_name(push.slot) in self.shard.slots:
            self._versions[push.slot] = self.shard.version
        return [push.outcome(APPLIED, staleness)]

    def joined(self, slot: int) -> list[PushOutcome]:
        self._versions.pop(slot, None)
        return []

    def state(self) -> Json:
        return {"versions": sorted(map(list, self._versions.items()))}

    def resume(self, state: Json) -> None:
        self._versions = dict(state["versions"])


def _rounded_fetches(job: JobFile) -> list[Fault]:
    """A worker reads its own copy of w, and a correction refers to exactly that."""
    if job.servers.fetch_values == "float32":
        return []
    what = "each worker reads its own copy, exactly as on the servers"
    return [(("servers", "fetch_values"), what, 'use "float32"')]


DC_ASGD = Method(Options=Options, replica=Replica, shard=Server, check=_rounded_fetches)
