"""Named vectors on one shard, and the operations on them that a coordinator-driven method asks for.

Sandblaster (Dean 2012, §4.2): a shard owns the same slice of every vector; intermediate vectors
stay where they are and only scalars travel. Vectors are float64: the two-loop recursion subtracts
nearly equal numbers. "w" is the shard's parameters, "accrued" what pushes have added up. All of it
is in memory only and written in place, "w" too: see `Shape.survives`.
"""

from __future__ import annotations

import numpy as np

from dlctl.errors import RemoteProtocolError
from dlctl.messages import Array, VectorOp
from dlctl.shards.base import Shard, W


class Vectors:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._newest = 0
        self._result = 0.0

    def run(self, message: VectorOp) -> float | None:
        """Do one operation, once: a repeat gets the result that it got before.

        The coordinator sends an operation when all shards have answered the one before; so an older
        number than the newest is a copy that was late on its way, nobody waits for it, and it is
        answered with None. Raises RemoteProtocolError for an unknown operation.
        """
        if message.number < self._newest:
            return None
        if message.number > self._newest:
            self._result = self._run(message)
            self._newest = message.number
        return self._result

    def _run(self, message: VectorOp) -> float:
        a, x, y = message.a, self._vector(message.x), message.y
        if W in (message.x, y):
            self._shard.history.forget()  # It may be written, and its version stays.
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
            case "norm1":
                return float(np.abs(x).sum(dtype=np.float64))
            case "free":
                self._shard.vectors.pop(message.x, None)
            case _:
                raise RemoteProtocolError(f'no vector operation is called "{message.op:.20}"')
        return 0.0

    def _vector(self, name: str) -> Array:
        if name == W:
            return self._shard.w
        if name not in self._shard.vectors:
            self._shard.vectors[name] = np.zeros(self._shard.size)
        return self._shard.vectors[name]
