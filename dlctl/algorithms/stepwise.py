"""Replicas that push each gradient that they compute.

`Replica` is that of methods that are implemented in the servers: read, compute one, push it.

    loop:  w_i = w;  push grad(w_i, next mini-batch)

A read contains the replica's own pushes. The compressor's residual is in the next push. Methods
with a `run` of their own use `accrue` and `write`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from dlctl.algorithms.base import Needs, ReplicaSide
from dlctl.algorithms.needs import Gradient, NextData, Read, Step, Write

Accrues = Generator[NextData | Gradient, Any, int]
"""Computes a gradient, or more; returns their samples, 0 without data."""


def accrue(side: ReplicaSide) -> Accrues:
    """Add the next gradient to the residual. Returns its samples, 0 without data."""
    computed: Step | None = yield Gradient()
    if computed is None:
        return 0
    assert computed.gradient is not None
    side.accrue(computed.gradient)
    return computed.samples


def write(side: ReplicaSide, samples: int, clock: int) -> Write:
    """Push the residual for a step; without samples an empty push, only to take part."""
    if samples:
        return side.write_residual(samples=samples, clock=clock)
    return Write(vector=None, clock=clock)


class Replica(ReplicaSide):
    def changes_parameters(self) -> bool:
        return False

    def run(self) -> Needs:
        while True:
            if (yield NextData()) is None:
                continue
            yield Read(wait=True, after_own=True)
            computed = yield Gradient()
            if computed is not None:
                self.residual += computed.gradient
                yield Write(vector=self.residual, samples=computed.samples)
