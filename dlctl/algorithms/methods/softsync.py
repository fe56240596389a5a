"""n-softsync. Zhang et al., "Staleness-Aware Async-SGD for Distributed Deep Learning", IJCAI 2016.

Lambda learners compute one gradient after the other, each at the newest parameters. A shard takes
c = floor(lambda / n) of them, from any learners, makes one update by their mean, and counts it.
In the paper's words, n = `n`, i is the number of updates so far, and alpha_0 is the rate of the
servers' optimiser:

    learner:  w_j = w, read after j updates;  push grad(w_j, next mini-batch)
    shard:    tau = i - j;  buffer += grad / max(tau, 1)        # a rate of its own: alpha_0 / tau
              every c-th push:  w -= alpha_0 * buffer / c;  buffer = 0;  i += 1

n = 1 waits for as many gradients as there are learners, and each of them is about one update old;
n = lambda updates with every gradient, and is Downpour with n_fetch = n_push = 1 if `modulated` is
false. Learners do not add gradients up (§3.1 of the paper).

Where the paper says nothing:

- lambda is the number of replicas that take part now: a death or a join changes c from the next
  push on. If there are already more in the buffer, the next push completes it, and the mean is of
  all of them. No replica ever waits.
- A gradient in the buffer is in the commit that acknowledges its push, with its factor. At the end
  of a run the buffer holds less than c gradients: they are in its last checkpoint, and in no
  update.
- Each shard has its own buffer, and counts its own updates. After c has changed, the age of an
  earlier gradient is computed as if c had always had its current value.
- With another optimiser than SGD the factor applies to the gradient that it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge

from dlctl.algorithms.base import Fault, Method, PushOutcome, ShardSide
from dlctl.algorithms.stepwise import Replica
from dlctl.compress.base import Delta
from dlctl.job.config import JobFile
from dlctl.optim import buffered
from dlctl.optim.base import Optimizer
from dlctl.optim.buffered import CAPACITY, STEPS, Buffered
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, BUFFERED, Json


@dataclass(slots=True, kw_only=True)
class Options:
    n: Annotated[int, Ge(1)] = 1
    """Updates per as many gradients as there are workers: from 1, nearly synchronous, to the number
    of workers, each gradient an update."""
    modulated: bool = True
    """A gradient that is tau updates old counts with a rate of alpha_0 / tau; false: all count with
    alpha_0."""


class SoftsyncServer(ShardSide):
    def __init__(self, options: Options, shard: Shard) -> None:
        super().__init__(options, shard)
        self._capacity = 1
        self._since = (0, 0, 0)
        """When `_capacity` was set: the shard's version, its updates, pushes in the buffer."""

    @classmethod
    def optimizer(cls, options: Options, optimizer: Optimizer, workers: int) -> Optimizer:
        return Buffered(optimizer, 1)

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        counters = self.shard.optimizer.counters
        staleness = max(0, counters[STEPS] - self._updates_at(push.base_version))
        if self.options.modulated and staleness > 1:
            delta = delta._replace(values=delta.values * np.float32(1 / staleness))
        self.shard.apply(delta, push.samples, counters={CAPACITY: self._capacity})
        kind = BUFFERED if counters[buffered.BUFFERED] else APPLIED
        return [push.outcome(kind, staleness)]

    def members(self, slots: frozenset[int]) -> list[PushOutcome]:
        capacity = max(1, len(slots) // self.options.n)
        if capacity != self._capacity:
            counters = self.shard.optimizer.counters
            in_buffer = min(counters[buffered.BUFFERED], capacity - 1)
            self._capacity = capacity
            self._since = (self.shard.version, counters[STEPS], in_buffer)
        return []

    def _updates_at(self, version: int) -> int:
        """Updates that were made before the shard had this version."""
        since, updates, in_buffer = self._since
        return updates + (version - since + in_buffer) // self._capacity

    def state(self) -> Json:
        return {"capacity": self._capacity, "since": list(self._since)}

    def resume(self, state: Json) -> None:
        self._capacity, self._since = state["capacity"], tuple(state["since"])

    def restore(self, state: Json) -> None:
        self.resume(state)


def _more_than_workers(job: JobFile) -> list[Fault]:
    n, workers = job.algorithm.options.get("n", 1), job.workers.count
    if n <= workers:
        return []
    what = f"more updates than workers: {n} of {workers} gradients"
    return [(("algorithm", "n"), what, f"use 1 to {workers}")]


SOFTSYNC = Method(Options=Options, replica=Replica, shard=SoftsyncServer, check=_more_than_workers)
