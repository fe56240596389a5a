"""Asynchronous DiLoCo. Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024
(arXiv 2401.09135), Alg. 2: delayed Nesterov momentum, and local steps by each worker's speed.

DiLoCo in which no replica waits for another. A replica makes H steps, pushes the difference to the
fetched parameters, and continues from the servers' parameters after that push:

    replica i:  theta_i = theta                               # fetched, with its own push in it
                H_i times: theta_i = inner(theta_i, grad(theta_i, next mini-batch))
                push theta_fetched - theta_i
    shard:      theta = outer(theta, push)                    # at once

The outer optimiser is `delayed-nesterov`, which is made for pushes that arrive one by one. Its
default for `every` is the job's number of workers.

With `dynamic_steps` (DyLU in the paper) the steps of a replica depend on its speed v_i, so that
pushes of stragglers are less stale, and all push about as often:

                H_i = max(1, ceil(H v_i / max_j v_j))

Each replica measures its own speed, and writes it to its place of a small table; those of replicas
that have left do not count. In the paper the speeds are known beforehand.

If a replica dies, its round is lost, and its portions are leased again. A replica whose steps
diverge pushes nothing of its round and resumes from the servers' parameters.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from dlctl.algorithms.base import (
    MODEL,
    Method,
    Needs,
    PushKind,
    PushOutcome,
    ReplicaSide,
    Shape,
    Start,
    Table,
)
from dlctl.algorithms.methods import downpour
from dlctl.algorithms.needs import NextData, Read, View, Write
from dlctl.algorithms.rounds import Rounds
from dlctl.compress.base import Delta
from dlctl.job.config import COUNT_MAX, Choice
from dlctl.job.settings import Live
from dlctl.optim.base import Optimizer
from dlctl.optim.delayed_nesterov import DelayedNesterov
from dlctl.optim.wrapping import Wrapping
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED

SPEEDS = "speeds"
"""The table of steps per second, one place for each slot; 0: not measured."""


@dataclass(slots=True, kw_only=True)
class Options:
    local_steps: Live[Annotated[int, Ge(1)]] = 50
    """Steps of the fastest replica from one push to the next, H; the paper has 50."""
    dynamic_steps: bool = True
    """Slower replicas make fewer steps, in proportion to their speed; false: as many."""


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
            steps = self.options.local_steps
            if self.options.dynamic_steps:
                steps = yield from self._compare_speeds()
            samples = yield from self.rounds.steps(steps)
            is_diverged = not self.rounds.is_open or (samples > 0 and not self.rounds.end())
            self.rounds.close()
            if is_diverged:
                yield Write(vector=None)
            elif samples:
                yield self.write_residual(samples=samples)

    def _compare_speeds(self) -> Generator[Write | Read, Any, int]:
        """Publish this replica's speed. Returns its steps."""
        own = (self.slot, self.slot + 1)
        speed = 1 / self.step_s if self.step_s else 0.0
        yield Write(table=SPEEDS, ranges=(own,), vector=np.array([speed], np.float32))
        view: View = yield Read(table=SPEEDS, wait=True, into="beside")
        assert view.values is not None
        fastest = max(view.values[sorted(self.members)], default=0.0)
        part = speed / fastest if 0 < speed < fastest else 1.0
        return max(1, math.ceil(self.options.local_steps * part))


class Server(downpour.Server):
    """Applies every push at once. A push without samples is of a round that diverged, and empty."""

    @classmethod
    def optimizer(cls, options: Any, optimizer: Optimizer, workers: int) -> Optimizer:
        rule = optimizer.inner if isinstance(optimizer, Wrapping) else optimizer
        if isinstance(rule, DelayedNesterov) and rule.follows_workers:
            rule.set_every(workers)
        return optimizer

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        if push.samples:
            return super().push(push, delta)
        return [push.outcome(APPLIED)]


ASYNC_DILOCO = Method(
    Options=Options,
    shape=Shape(
        tables=(MODEL, Table(name=SPEEDS, rule="set", size=lambda layout: COUNT_MAX)),
    ),
    replica=Replica,
    shard=Server,
    optimizer=Choice(name="delayed-nesterov"),
    inner=Choice(name="adamw", options={"lr": 4e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}),
)
