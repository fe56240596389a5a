"""The replica of methods that are implemented in the servers: read, compute one gradient, push it.

    loop:  w_i = w;  push grad(w_i, next mini-batch)

A read contains the replica's own pushes. The compressor's residual is in the next push.
"""

from __future__ import annotations

from dlctl.algorithms.base import Needs, ReplicaSide
from dlctl.algorithms.needs import Gradient, NextData, Read, Write


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
