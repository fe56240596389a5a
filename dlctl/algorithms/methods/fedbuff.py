"""FedBuff. Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS
2022, Alg. 1: local SGD without a barrier.

A replica reads the servers' parameters, makes H steps on its own, and pushes the difference. No
other replica waits for it. A shard buffers K pushes, of any replicas, and then makes one step with
the servers' optimiser by their mean. In the paper's words, K = `buffer_pushes`, and on both sides:

    replica:  theta_i = theta, read after j steps of the shard
              H times: theta_i = inner(theta_i, grad(theta_i, next mini-batch))
              push Delta_i = theta - theta_i
    shard:    tau = steps - j;  buffer += s(tau) Delta_i
              every K-th push:  theta = outer(theta, buffer / K);  buffer = 0;  steps += 1

H is `local_steps`. s(tau) is 1 unless `staleness_weight` is "root": 1 / sqrt(1 + tau). As in the
paper the weights are not normalised, and do not depend on the number of samples.

- The commit that acknowledges a push includes its place in the buffer and its weight: no death
  loses it. At the end of a run the buffer may hold less than K: they are in the last checkpoint and
  in no step.
- Each shard counts its own steps, so the order of pushes may differ between two shards, and a push
  may be in different steps on them. j is that of the shard that had made the fewest steps.
- Where data ends a replica pushes the steps that it has made. One whose steps diverge, or that has
  several discarded gradients in a row, pushes nothing of its round, as in local SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from dlctl.algorithms.base import (
    Fault,
    Method,
    Needs,
    PushKind,
    PushOutcome,
    ReplicaSide,
    ShardSide,
    Start,
)
from dlctl.algorithms.needs import NextData, Read
from dlctl.algorithms.rounds import Rounds
from dlctl.algorithms.stepwise import write
from dlctl.compress.base import Delta
from dlctl.job.config import Choice, JobFile
from dlctl.job.settings import Live
from dlctl.optim import buffered
from dlctl.optim.base import Optimizer
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, BUFFERED


@dataclass(slots=True, kw_only=True)
class Options:
    local_steps: Live[Annotated[int, Ge(1)]] = 16
    """Steps of a replica from one push to the next, H."""
    buffer_pushes: Annotated[int, Ge(1)] = 10
    """Pushes whose mean makes one step of the servers, K."""
    staleness_weight: Literal["constant", "root"] = "constant"
    """Weight of a push that is tau steps of the servers old. "constant": 1; "root": 1 over the root
    of 1 + tau."""


class Replica(ReplicaSide):
    options: Options

    @classmethod
    def one_push(cls, options: Options) -> PushKind:
        return PushKind(options.local_steps, is_displacement=True)

    def begin(self, start: Start) -> None:
        self.rounds = self.arrival = Rounds(self)

    def run(self) -> Needs:
        while True:
            if (yield NextData()) is None:
                continue
            yield Read(wait=True, after_own=True)
            clock = self.view.clock_min
            samples = yield from self.rounds.steps(self.options.local_steps)
            brings = samples > 0 and self.rounds.end()
            self.rounds.close()
            yield write(self, samples if brings else 0, clock)


class FedBuffServer(ShardSide):
    """Buffers pushes and makes a step of every K. The clock is the number of steps."""

    @classmethod
    def optimizer(cls, options: Options, optimizer: Optimizer, workers: int) -> Optimizer:
        return buffered.Buffered(optimizer, options.buffer_pushes)

    def clock(self) -> int:
        return int(self.shard.optimizer.counters[buffered.STEPS])

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        staleness = max(0, self.clock() - push.clock)
        kind = APPLIED
        if push.samples:  # Else the round has no result, and takes no place in the buffer.
            if self.options.staleness_weight == "root":
                weight = np.float32((1 + staleness) ** -0.5)
                delta = delta._replace(values=delta.values * weight)
            capacity = {buffered.CAPACITY: self.options.buffer_pushes}
            self.shard.apply(delta, push.samples, counters=capacity)
            kind = BUFFERED if self.shard.optimizer.counters[buffered.BUFFERED] else APPLIED
        return [push.outcome(kind, staleness)]


def check_steps(job: JobFile, steps: float) -> list[Fault]:
    """Whether the buffer is ever full; every worker may end in the middle of a round."""
    options = Options(**job.algorithm.options)
    pushes = steps // options.local_steps + job.workers.count
    if options.buffer_pushes <= pushes:
        return []
    what = f"the run has at most {pushes:.0f} pushes, so that the servers would never make a step"
    return [(("algorithm", "buffer_pushes"), what, "make it smaller, or local_steps")]


FEDBUFF = Method(
    Options=Options,
    check_steps=check_steps,
    replica=Replica,
    shard=FedBuffServer,
    optimizer=Choice(name="sgd", options={"lr": 1.0}),
    inner=Choice(name="sgd", options={"lr": 0.01}),
)
