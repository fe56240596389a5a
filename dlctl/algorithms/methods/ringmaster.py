"""Ringmaster ASGD. Maranjyan, Tyurin, Richtarik, "Ringmaster ASGD: The First Asynchronous SGD with
Optimal Time Complexity", ICML 2025.

Asynchronous SGD that drops stale gradients. In the paper's words, R = `delay_max`, k is
the number of updates so far, delta is the delay of a gradient, and gamma is the rate of the
servers' optimiser:

    worker i:  x_i = x;  push grad(x_i, next mini-batch)
    shard:     delta = k - (k when x_i was read)
               if delta < R:  x -= gamma * grad;  k += 1
               else:          the gradient is dropped
               either way the worker continues from the present x

This was derived from the abstract of the paper and from accounts of it, and not from its text. The
form that stops workers in the middle of a gradient that has become too old is not here: a gradient
is computed to its end.

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

from dlctl.algorithms.base import Method, PushOutcome, ShardSide
from dlctl.algorithms.stepwise import Replica
from dlctl.compress.base import Delta
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, LATE


@dataclass(slots=True, kw_only=True)
class Options:
    delay_max: Annotated[int, Ge(1)] = 16
    """Updates, R: a gradient is dropped if so many were made since its parameters were read."""


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
