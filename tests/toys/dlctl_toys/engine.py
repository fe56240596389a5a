"""toy-engine: between two reads a replica goes on along its gradients, scaled by a running mean of
their squares (as in RMSprop, Hinton 2012), which its engine keeps.

    push g;  v = 0.9 v + 0.1 g^2;  w -= rate * g / (sqrt(v) + eps);  every other step: read w

It guards engines: their operations and twins, their state in checkpoints, and replicas of several
processes, each of which has its part of v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Gt

from dlctl.algorithms.base import Method, Needs, ReplicaSide, Shape
from dlctl.algorithms.engines import MethodEngine, Operation, TwinPlace
from dlctl.algorithms.methods.downpour import Server
from dlctl.algorithms.needs import Engine, Gradient, NextData, Read
from dlctl.job.settings import Live
from dlctl.model.vector import copy_into, to_host
from dlctl.wire.messages import Array

DECAY, EPS = np.float32(0.9), np.float32(1e-8)
RANKS_MAX = 8
EVERY = 2


@dataclass(slots=True, kw_only=True)
class Options:
    rate: Live[Annotated[float, Gt(0)]] = 0.001
    """Rate of a replica's own steps."""


class Replica(ReplicaSide):
    options: Options

    def run(self) -> Needs:
        step = 0
        while True:
            data = yield NextData()
            if data is None:
                continue
            if step % EVERY == 0:
                yield Read(wait=True)
            computed = yield Gradient()
            if computed is None:
                continue
            gradient = to_host(computed.gradient)
            (way,) = yield Engine(op="way", arrays=(gradient,), shapes=(gradient.shape,))
            moved = to_host(self.parameters) - np.float32(self.options.rate) * way
            copy_into(self.parameters, moved)
            self.accrue(computed.gradient)
            yield self.write_residual(samples=computed.samples)
            step += 1


class Twin(MethodEngine):
    """What `curvature.Curvature` is in torch."""

    def __init__(self, place: TwinPlace) -> None:
        self.v = np.zeros(place.parameters.size, np.float32)
        self.steps = np.zeros(RANKS_MAX, np.float32)

    def operations(self) -> Mapping[str, Operation]:
        return {"way": self.way}

    def way(self, gradient: Array) -> tuple[Array]:
        self.v = DECAY * self.v + (1 - DECAY) * gradient**2
        self.steps[0] += 1
        return (gradient / (np.sqrt(self.v) + EPS),)

    def state(self) -> dict[str, Array]:
        return {"v": self.v, "steps": self.steps}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.v, self.steps = state["v"].copy(), state["steps"].copy()


ENGINE = Method(
    Options=Options,
    replica=Replica,
    shard=Server,
    shape=Shape(engine="dlctl_toys.curvature:Curvature", twin="dlctl_toys.engine:Twin", ranks=True),
)
