"""Ringmaster ASGD. Maranjyan, Tyurin, Richtarik, "Ringmaster ASGD: The First Asynchronous SGD with
Optimal Time Complexity", ICML 2025.

Asynchronous SGD that drops stale gradients. In the paper's words, R = `delay_max`, k is
the number of updates so far, delta is the delay of a gradient, and gamma is the rate of the
servers' optimiser:

    worker i:  x_i = x;  push grad(x_i, next mini-batch); when delta = R: stops, begins again
    shard:     delta = k - (k when x_i was read)
               if delta < R:  x -= gamma * grad;  k += 1
               else:          the gradient is dropped
               either way the worker continues from the present x

This was derived from the abstract of the paper and from accounts of it, and not from its text. It
has a form that drops gradients when they come, and one that stops them as soon as they are too old.

- With `gradient.accumulate` a worker stops in the middle of a gradient: when all shards are R
  updates ahead of the parameters that it read, it gives up between two of the accumulated batches,
  reads the newest parameters, and computes the gradient of the same samples again. No sample of a
  stopped gradient is lost, none counts twice; the task's loss gets the same tensors again, and must
  not write to them. A gradient that is found to be too old after its last batch is pushed, and
  dropped. torch does not stop within one batch: without `accumulate` a gradient is computed to its
  end, and dropped; likewise in a training loop of the user's own, and in a worker of several
  processes.
- So a worker that is always slower than R updates contributes nothing while the others work, as in
  the paper. Its portion is trained when they have no data left, and make no updates any more. A
  worker that drains does not stop: it computes its portion to the end. While the others work these
  gradients are too old as well, and are dropped: their samples are not trained in this epoch.

- With R at least as large as the number of workers none is dropped while all are equally fast. With
  R = 1 only gradients of the current parameters count.
- A dropped gradient is LATE: its samples are not computed again in this epoch. A compressor has
  removed it from its residual.
- Each shard counts its own updates, and decides on its own: a gradient may be too old on one shard,
  and just young enough on another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from dlctl.algorithms.base import Method, Needs, PushOutcome, ReplicaSide, ShardSide
from dlctl.algorithms.needs import Gradient, NextData, Read, View, Write
from dlctl.compress.base import Delta
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, LATE


@dataclass(slots=True, kw_only=True)
class Options:
    delay_max: Annotated[int, Ge(1)] = 16
    """Updates, R: a gradient is dropped if so many were made since its parameters were read."""


class Replica(ReplicaSide):
    def changes_parameters(self) -> bool:
        return False

    def delay_max(self, version: int) -> int:
        """Updates after which a gradient is too old whose parameters are of this version."""
        most: int = self.options.delay_max
        return most

    def run(self) -> Needs:
        while True:
            if (yield NextData()) is None:
                continue
            view: View = yield Read(wait=True, after_own=True)
            computed = yield Gradient(stale_after=self.delay_max(view.clock_max))
            if computed is not None:
                self.residual += computed.gradient
                yield Write(vector=self.residual, samples=computed.samples)


class Server(ShardSide):
    def delay_max(self) -> int:
        """R, for the next update."""
        most: int = self.options.delay_max
        return most

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        delay = max(0, self.shard.version - push.base_version)
        if delay >= self.delay_max():
            return [push.outcome(LATE, delay)]
        self.shard.apply(delta, push.samples)
        return [push.outcome(APPLIED, delay)]


RINGMASTER = Method(Options=Options, replica=Replica, shard=Server)
