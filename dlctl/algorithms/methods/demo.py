"""DeMo. Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", 2024 (arXiv
2411.19870), Alg. 1, with the signs of the authors' code.

Synchronous SGD whose momenta are local to the replicas. A replica sends only the largest frequency
components of its momentum, and keeps the rest:

    replica i:  d = beta d + grad(w_t, next mini-batch)       # beta = momentum_decay
                push q_i = the largest coefficients of d;  d = d - q_i
    shard:      w_{t+1} = w_t - eta sign(mean_i(q_i))

The momentum is the residual of `[compression]`, by default `dct`; the step is that of the servers'
optimiser: `lion` with both betas 0 steps along the sign of the push, and its weight decay is the
paper's. A rate of 1e-4 to 1e-3 is usual.

- In the authors' code d accumulates eta grad. For a constant eta that is the same d in another
  unit; with a schedule the gradients here have equal weights, however small eta is.
- The mean of each coefficient is over all replicas, by their samples, as in the paper; in the
  authors' code it is over those that have sent it.

Steps, members and deaths are those of `sync`. d is in checkpoints; if a replica dies, it is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from dlctl.algorithms import barrier, stepwise
from dlctl.algorithms.base import Method, Needs, ReplicaSide
from dlctl.algorithms.means import Mean
from dlctl.algorithms.needs import Gradient, Step
from dlctl.job.config import Choice


@dataclass(slots=True, kw_only=True)
class Options:
    momentum_decay: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay of a replica's momentum per step, beta."""


class Replica(ReplicaSide):
    options: Options

    def run(self) -> Needs:
        clock = yield from barrier.join()
        while True:
            samples = yield from self._accrue()
            yield stepwise.write(self, samples, clock)
            clock = yield from barrier.next_step(clock)

    def _accrue(self) -> stepwise.Accrues:
        computed: Step | None = yield Gradient()
        if computed is None:
            return 0
        self.residual *= self.options.momentum_decay
        self.residual += computed.gradient
        return computed.samples


class OfMomenta(Mean):
    """A push is a part of a momentum, not the gradient of a batch."""

    is_of_gradients = False


DEMO = Method(
    Options=Options,
    replica=Replica,
    shard=barrier.Barrier,
    mean=OfMomenta,
    optimizer=Choice(name="lion", options={"lr": 1e-3, "beta1": 0.0, "beta2": 0.0}),
    compression=Choice(name="dct"),
)
