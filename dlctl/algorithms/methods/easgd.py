"""Elastic averaging SGD. Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD",
NeurIPS 2015, Alg. 1 and 2 (the asynchronous ones).

Each of p replicas has its own position x, and steps on its own. The servers have the centre x~.
Every tau steps of its own clock a replica and the centre pull each other nearer:

    every tau steps:  read x~, and wait for it
                      e = alpha (x - x~)
    g = gradient at x                       # before the pull, as in the authors' code
    x = x - eta g
    every tau steps:  x = x - e;  the servers: x~ = x~ + e

In the paper's words, tau = `exchange_every_steps`, alpha = `alpha`, and eta is the rate of the
replicas' own optimiser (`[inner]`). beta = p alpha = 0.9 unless `alpha` is set: p is the number of
replicas that currently take part. The centre is evaluated, saved and exported.

- e is one vector with two signs, so only gradients change the sum of all positions and the centre.
  Entries that a compressor does not send are not subtracted either: they stay a part of x - x~, and
  are sent later. So e needs no residual.
- The servers add the pushes, in order of arrival: their optimiser has no part in it.
- A replica that joins begins at the centre. So does one with several discarded gradients in a row,
  or with parameters that are not finite; its position is lost.
- If a replica dies, the difference of its position from the centre is lost, all but alpha of the
  last steps. Its position, and the state of its optimiser, are in checkpoints.

EAMSGD is the same with Nesterov's momentum delta in the replicas:

    v = delta v - eta g(x + delta v);  x = x + v

torch's form, b = delta b + g; y = y - eta (g + delta b), is that with v = -eta b, in the variable
y = x + delta v, where the gradient is taken. So it is SGD with `momentum` and `nesterov` as the
replicas' optimiser; e is taken from y then, and in the authors' code from x.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from dlctl.algorithms.base import (
    MODEL,
    Arrival,
    Fault,
    Method,
    Needs,
    PushKind,
    ReplicaSide,
    Shape,
    Start,
)
from dlctl.algorithms.needs import Gradient, NextData, Read, Write
from dlctl.algorithms.rounds import Discards
from dlctl.job.config import Choice, JobFile
from dlctl.job.settings import Live
from dlctl.model.vector import Vector, copy_into, copy_of, is_finite, zeros_like
from dlctl.wire.messages import Array

BETA = 0.9
"""p alpha, the paper's choice."""
Exchange = Generator[Read | Write, Any, None]


@dataclass(slots=True, kw_only=True)
class Options:
    exchange_every_steps: Live[Annotated[int, Ge(1)]] = 10
    """Steps of a replica from one exchange with the centre to the next, tau; the first exchange is
    before its first step."""
    alpha: Live[Annotated[float, Gt(0), Le(1)] | Literal["auto"]] = "auto"
    """Fraction of their distance by which a replica and the centre move towards each other at an
    exchange. "auto": 0.9 over the number of replicas."""


class Position:
    """Where a replica is on its own, and its steps since the last due exchange."""

    def __init__(self, side: ReplicaSide) -> None:
        self.side = side
        self.is_known = False
        """The replica has a position; without one the next read makes the centre its position."""
        self.steps = 0

    def is_due(self) -> bool:
        return not self.is_known or self.steps >= self.side.options.exchange_every_steps

    def give_up(self) -> None:
        self.is_known, self.steps = False, 0

    def state(self) -> dict[str, Vector]:
        if not self.is_known:
            return {}
        return {"position": self.side.parameters, "steps": np.array([self.steps], np.float32)}

    def restore(self, state: Mapping[str, Array]) -> None:
        if "position" in state and state["position"].size == len(self.side.parameters):
            copy_into(self.side.parameters, state["position"])
            self.is_known, self.steps = True, int(state["steps"][0])


class Replica(ReplicaSide):
    keeps_position = True
    options: Options

    @classmethod
    def one_push(cls, options: Options) -> PushKind:
        return PushKind(options.exchange_every_steps, is_displacement=True, is_all=False)

    def begin(self, start: Start) -> None:
        self.residual = self.residual[:0]
        self.position = Position(self)
        self.arrival = self._centre = _Centre(self, self.position)

    def state(self) -> dict[str, Vector]:
        return self.position.state()

    def restore(self, state: Mapping[str, Array]) -> None:
        self.position.restore(state)

    def run(self) -> Needs:
        samples, discards = 0, Discards()
        while True:
            data = yield NextData()
            if data is not None and discards.is_diverged:
                yield from self._begin_at_centre(samples)
                samples = 0
            is_due = bool(samples) if data is None else self.position.is_due()
            if is_due:
                self._centre.alpha = alpha_of(self)
                yield Read(wait=True)
                self.position.is_known = True
            if data is not None:
                computed = yield Gradient(step=True, gather=False)
                if discards.count(computed):
                    continue
                samples += computed.samples
                self.position.steps = 1 if is_due else self.position.steps + 1
            if is_due:
                yield from self._exchange(samples)
                samples = 0

    def _exchange(self, samples: int) -> Exchange:
        if not is_finite(self._centre.pull):
            yield from self._begin_at_centre(samples)
            return
        sent = yield Write(vector=self._centre.pull, samples=samples, tells=True)
        self.parameters -= sent

    def _begin_at_centre(self, samples: int) -> Exchange:
        """Discard the position, and the steps that no push holds."""
        self.position.give_up()
        yield Read(wait=True)
        self.position.is_known = True
        if samples:
            yield Write(vector=None)


class Beside(Arrival):
    """What is read stands beside a position: x stays in the model, and `pull` becomes e. A replica
    without a position takes what is read.
    """

    def __init__(self, side: ReplicaSide, position: Position) -> None:
        self.side = side
        self.position = position
        self.pull = zeros_like(side.parameters)

    def before(self, lo: int, hi: int) -> None:
        self.pull[lo:hi] = self.side.parameters[lo:hi]

    def after(self, lo: int, hi: int) -> None:
        pull, model = self.pull[lo:hi], self.side.parameters[lo:hi]
        if not self.position.is_known:
            pull[:] = 0
            return
        position = copy_of(pull)
        self.take(pull, model)
        model[:] = position

    def take(self, pull: Vector, read: Vector) -> None:
        """Make e of what was read. pull: float32[hi - lo], the position, is replaced by it."""
        copy_into(pull, read)


class _Centre(Beside):
    """The centre is read: e = alpha (x - centre)."""

    alpha = 0.0

    def take(self, pull: Vector, read: Vector) -> None:
        pull -= read
        pull *= self.alpha


def alpha_of(side: ReplicaSide) -> float:
    """The elastic force of a replica, alpha, by its current settings."""
    alpha = side.options.alpha
    return BETA / len(side.members | {side.slot}) if isinstance(alpha, str) else alpha


def check(job: JobFile) -> list[Fault]:
    """Elastic symmetry: the centre gains exactly what the replica loses."""
    found: list[Fault] = []
    if job.optimizer.options.get("lr", 1.0) != 1.0:
        what = f"the servers of {job.algorithm.name} add pushes, and have no rate"
        found.append((("optimizer", "lr"), what, "remove [optimizer]; [inner] has the rate"))
    if job.compression.options.get("unbiased"):
        what = f"{job.algorithm.name} subtracts from a replica exactly what its push holds"
        found.append((("compression", "unbiased"), what, "remove it"))
    return found


def check_momentum(job: JobFile) -> list[Fault]:
    """EAMSGD with an `[inner]` without momentum is EASGD."""
    found = check(job)
    if job.inner.name == "sgd" and not job.inner.options["momentum"]:
        what = f"{job.algorithm.name} without momentum is easgd"
        instead = "add momentum = 0.99 and nesterov = true, or remove [inner]"
        found.append((("inner", "name"), what, instead))
    return found


_method = partial(
    Method,
    Options=Options,
    replica=Replica,
    shape=Shape(tables=(replace(MODEL, rule="add"),), optimizers=("sgd",)),
    optimizer=Choice(name="sgd", options={"lr": 1.0}),
)
EASGD = _method(inner=Choice(name="sgd", options={"lr": 0.01}), check=check)
EAMSGD = _method(
    inner=Choice(name="sgd", options={"lr": 0.001, "momentum": 0.99, "nesterov": True}),
    check=check_momentum,
)
