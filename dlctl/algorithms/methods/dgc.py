"""Deep Gradient Compression. Lin et al., "Deep Gradient Compression: Reducing the Communication
Bandwidth for Distributed Training", ICLR 2018, Alg. 4 and section 3.

Synchronous SGD whose replicas send a thousandth of what they have accrued. Momentum is local to the
replicas, and they accrue steps with momentum, not gradients (momentum correction):

    replica i:  g = clip(grad(w_t, next mini-batch), threshold / sqrt(N))
                u = m u + g;  v = v + u                   # Nesterov: u = m (u + g); v = v + u + g
                push what is sent of v:  v = 0 and u = 0 there
    shard:      w_{t+1} = w_t - eta mean_i(pushes)        # no momentum: it would count twice

Setting u to zero where v was sent (momentum factor masking) discards stale momentum. In the first
data epochs more is sent (`warmup_density`), by the data epoch of the batch, which is the same for
all replicas except for a few steps at its end. The compressor selects what is sent: by default
`topk-sampled`, whose threshold is the paper's, with density 0.001.

- In the authors' code vectors such as biases are sent whole; here they are parts of a slice like
  all other parameters. A slice that is sent whole (`dense_below`) has no momentum.
- The servers' `weight_decay` is not part of the momentum, and applies to the elements of a push.

Steps, members and deaths are those of `sync`. u and v are in checkpoints; if a replica dies, its v
is lost.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from dlctl.algorithms import barrier
from dlctl.algorithms.base import Method, Needs, ReplicaSide, Shape, Start
from dlctl.algorithms.means import SparseMean
from dlctl.algorithms.needs import Gradient, NextData, Step, Write
from dlctl.algorithms.stepwise import Accrues
from dlctl.job.config import Choice
from dlctl.model.vector import Vector, copy_into, euclidean_norm, to_host, zeros_like
from dlctl.wire.messages import Array


@dataclass(slots=True, kw_only=True)
class Options:
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Momentum of the replicas' steps, m."""
    nesterov: bool = False
    """Nesterov's momentum; false: the heavy ball."""
    local_clip_norm: Annotated[float, Ge(0)] = 0.0
    """A replica's gradient is scaled down to a norm of this over the root of the number of
    replicas, before it is accrued; 0: no limit."""
    warmup_density: tuple[Annotated[float, Gt(0), Le(1)], ...] = (0.25, 0.0625, 0.015625, 0.004)
    """Smallest fraction of the elements in a push in the first data epoch, in the second, and so
    on; after that only the density of `[compression]` applies. []: no warm-up, as needed for a
    stream that is read once."""


class Replica(ReplicaSide):
    options: Options

    def begin(self, start: Start) -> None:
        self._velocity = zeros_like(self.parameters)
        """The paper's u, the momentum of the residual v."""
        self._density_min = 0.0
        """The least density of the next push, 0..1, during the warmup; 0: no lower bound."""

    def state(self) -> dict[str, Vector]:
        return {"residual": self.residual, "velocity": self._velocity}

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        if "velocity" in state and state["velocity"].size == len(self._velocity):
            copy_into(self._velocity, state["velocity"] + to_host(self._velocity))

    def run(self) -> Needs:
        clock = yield from barrier.join()
        while True:
            samples = yield from self._accrue()
            yield from self._push(samples, clock)
            clock = yield from barrier.next_step(clock)

    def _accrue(self) -> Accrues:
        data = yield NextData()
        computed: Step | None = None if data is None else (yield Gradient())
        if data is None or computed is None:
            return 0
        warmup = self.options.warmup_density
        self._density_min = warmup[data.data_epoch] if data.data_epoch < len(warmup) else 0.0
        self._add(self._clipped(computed))
        return computed.samples

    def _clipped(self, computed: Step) -> Vector:
        gradient: Vector = computed.gradient
        limit = self.options.local_clip_norm
        if limit:
            limit /= math.sqrt(len(self.members | {self.slot}))
            is_known = math.isfinite(computed.norm)
            norm = computed.norm if is_known else euclidean_norm(gradient)
            if norm > limit:
                gradient *= limit / norm
        return gradient

    def _add(self, gradient: Vector) -> None:
        """Add a gradient to velocity and residual, with momentum correction."""
        if self.options.nesterov:
            self._velocity += gradient
            self._velocity *= self.options.momentum
            self.residual += gradient
        else:
            self._velocity *= self.options.momentum
            self._velocity += gradient
        self.residual += self._velocity

    def _push(self, samples: int, clock: int) -> Generator[Write, Any, None]:
        """Momentum factor masking: the momentum of sent elements is reset."""
        if not samples:
            yield Write(vector=None, clock=clock)
            return
        sent: Vector = yield Write(
            vector=self.residual, samples=samples, clock=clock, density_min=self._density_min,
            tells=True,
        )  # fmt: skip
        self._velocity[sent != 0] = 0


class Corrected(SparseMean):
    """A push is a velocity, not the gradient of a batch."""

    is_of_gradients = False


DGC = Method(
    Options=Options,
    shape=Shape(
        optimizers=("sgd",),
        optimizers_why="its replicas have the momentum, which would count twice",
        compressors=("topk-sampled", "topk", "gaussian"),
    ),
    replica=Replica,
    shard=barrier.Barrier,
    mean=Corrected,
    compression=Choice(name="topk-sampled", options={"density": 0.001}),
)
