"""Ringmaster LMO. Maranjyan et al., "Ringmaster LMO", 2026 (arXiv 2605.18174), in the form of its
authors' code.

`ringmaster` whose steps are along a linear minimisation oracle. In the paper's words, R =
`delay_max`, k is the number of updates so far, delta is the delay of a gradient, gamma is the rate
of the servers' optimiser, and beta its `momentum`:

    worker i:  x_i = x;  push grad(x_i, next mini-batch)
    shard:     delta = k - (k when x_i was read)
               if delta < R:  B = beta B + (1 - beta) grad;   u = beta B + (1 - beta) grad
                              x -= gamma * lmo(u);  k += 1
               else:          the gradient is dropped, and the worker restarts from the present x

lmo(u) is near U V^T of a matrix, times sqrt(max(1, rows / columns)), and u of everything else: the
server optimiser `lmo` (dlctl-job(5)). It needs whole matrices, so shards are cut between them.

With `parameter_free`, R, beta and the rate follow from k alone, and only eta, the optimiser's `lr`,
is chosen:

    R = floor(sqrt(k)), at least 1;   beta = 1 - 1 / sqrt(k), 0 at first
    gamma = eta / (k + 1)^(3/4)

- The authors' program has R = 2 and gamma = 1 for eight workers by default, with gamma to be tuned.
- A worker whose gradient has become too old restarts as in `ringmaster`: with
  `gradient.accumulate` before the next of the batches that it accumulates, else once it has
  computed the gradient, as torch computes a batch to its end. The updates are those of the paper,
  later by the rest of a batch.
- The paper itself was not read: what the authors' code does was. There the restart counts from the
  update that makes a gradient too old, so that with `parameter_free` its R lags one update behind.
- Everything else is as in `ringmaster`: a dropped gradient is LATE, and each shard decides on its
  own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dlctl.algorithms.base import Fault, Method
from dlctl.algorithms.methods import ringmaster
from dlctl.job.config import Choice, JobFile
from dlctl.optim.base import Optimizer
from dlctl.optim.lmo import Lmo
from dlctl.optim.wrapping import Wrapping

OPTIMIZER = "lmo"


@dataclass(slots=True, kw_only=True)
class Options(ringmaster.Options):
    parameter_free: bool = False
    """R, the momentum and the decrease of the rate follow from the number of updates; `delay_max`
    and the optimiser's `momentum` are ignored."""


def delay_max(version: int) -> int:
    """R without parameters, for the update behind this version."""
    return max(1, math.isqrt(version))


class Replica(ringmaster.Replica):
    def delay_max(self, version: int) -> int:
        if not self.options.parameter_free:
            return super().delay_max(version)
        delay = 1
        while delay < delay_max(version + delay):
            delay += 1
        return delay


class Server(ringmaster.Server):
    @classmethod
    def optimizer(cls, options: Any, optimizer: Optimizer, workers: int) -> Optimizer:
        rule = optimizer
        while isinstance(rule, Wrapping):
            rule = rule.inner
        if isinstance(rule, Lmo):
            rule.is_parameter_free = options.parameter_free
        return optimizer

    def delay_max(self) -> int:
        if self.options.parameter_free:
            return delay_max(self.shard.version)
        return super().delay_max()


def _check(job: JobFile) -> list[Fault]:
    if job.algorithm.options["parameter_free"] and job.optimizer.name != OPTIMIZER:
        what = f"without parameters the steps are those of {OPTIMIZER}"
        return [(("optimizer", "name"), what, f'use "{OPTIMIZER}", or remove parameter_free')]
    return []


RINGMASTER_LMO = Method(
    Options=Options,
    replica=Replica,
    shard=Server,
    optimizer=Choice(name=OPTIMIZER),
    check=_check,
)
