"""Named vectors on one shard, and the operations on them that a coordinator-driven method asks for.

Sandblaster (Dean 2012, §4.2): a shard owns the same slice of every vector; intermediate vectors
stay where they are and only scalars travel. Vectors are float64: the two-loop recursion subtracts
nearly equal numbers. "w" is the shard's parameters, "accrued" what pushes have added up.
"""

from __future__ import annotations

import numpy as np

from dlctl.algorithms.base import Shard
from dlctl.errors import RemoteProtocolError
from dlctl.messages import Array, VectorOp

RESULTS_KEPT = 64


class Vectors:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._results: dict[int, float] = {}

    def run(self, message: VectorOp) -> float:
        """Do one operation, once: a repeated number gets the result that it got before.

        Raises RemoteProtocolError for an unknown operation.
        """
        if message.number not in self._results:
            self._results[message.number] = self._run(message)
            self._results.pop(message.number - RESULTS_KEPT, None)
        return self._results[message.number]

    def _run(self, message: VectorOp) -> float:
        a, x, y = message.a, self._vector(message.x), message.y
        match message.op:
            case "copy":
                self._vector(y)[:] = x
            case "scale":
                x *= a
            case "axpy":
                self._vector(y)[:] += a * x
            case "mul":
                self._vector(y)[:] *= x
            case "zero":
                x[:] = 0
            case "dot":
                return float(np.dot(x.astype(np.float64), self._vector(y).astype(np.float64)))
            case "free":
                self._shard.vectors.pop(message.x, None)
            case _:
                raise RemoteProtocolError(f'no vector operation is called "{message.op:.20}"')
        return 0.0

    def _vector(self, name: str) -> Array:
        if name == "w":
            return self._shard.w
        if name not in self._shard.vectors:
            self._shard.vectors[name] = np.zeros(self._shard.w.size)
        return self._shard.vectors[name]
