"""Operations on a server's tables that the lead of a method requests, each executed exactly once.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, §4.2: a shard owns the same slice
of every vector; the vectors stay where they are, and only scalars are sent.

A change has one target and is one commit of that table, together with its number. Operations are
executed in the order of their numbers, so a replacement server, or a duplicate message, finds by
the target's number whether a change is done; its sources are unchanged since then, because no later
operation has been executed. Sums change nothing: they are computed after all changes of their
message, and no later change is made until they are answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dlctl.algorithms.base import Change, Sum
from dlctl.compress.base import Delta
from dlctl.errors import RemoteProtocolError
from dlctl.model.vector import all_finite
from dlctl.roles.server.table_shard import TableShard
from dlctl.shards.errors import Diverged
from dlctl.util import threads
from dlctl.wire.messages import Array, VectorOp

OPS_MAX = 4096
"""Operations in one message: the maximum length of a list on the wire."""


class ShardVectors:
    def __init__(self, tables: Sequence[TableShard]) -> None:
        self._tables: Mapping[str, TableShard] = {table.declared.name: table for table in tables}

    @property
    def newest(self) -> int:
        """The number of the newest message with a change; 0: none."""
        return max(0, *(table.newest_op // OPS_MAX for table in self._tables.values()))

    def run(self, message: VectorOp) -> tuple[float, ...]:
        """Make the changes that are not made yet; returns the sums. A stale message is ignored: its
        answer is not awaited any more. Raises RemoteProtocolError, and Diverged for a change that
        would not be finite.
        """
        changes, sums = self._parse(message)
        if self.newest > message.number:
            return ()
        first = message.number * OPS_MAX
        newest = max(table.newest_op for table in self._tables.values())
        for number, change in enumerate(changes, first):
            if number > newest:
                self._change(change, number)
        return tuple(map(self._sum, sums))

    def _parse(self, message: VectorOp) -> tuple[list[Change], list[Sum]]:
        """`DrivenMethod` has checked the names: only the sizes are not known there."""
        changes: list[Change] = []
        sums: list[Sum] = []
        for op, x, y, a in zip(message.ops, message.x, message.y, message.a, strict=True):
            names = {x} if op == "norm1" else {x, y}
            if len({self._tables[name].shard.size for name in names}) > 1:
                raise RemoteProtocolError(f'the tables "{x:.20}" and "{y:.20}" differ in size')
            if op in ("copy", "axpy"):
                changes.append(Change(op, x, y, a))
            else:
                sums.append(Sum(op, x, y))
        return changes, sums

    def _change(self, change: Change, number: int) -> None:
        x, target = self._tables[change.x].shard.w, self._tables[change.y]
        y = target.shard.w
        made, a = np.empty_like(y), x.dtype.type(change.a)

        def part(lo: int, hi: int) -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # The result is checked below.
                scaled = x[lo:hi] if change.a == 1.0 else x[lo:hi] * a
                made[lo:hi] = y[lo:hi] + scaled if change.op == "axpy" else scaled

        threads.in_parts(made.size, part)
        if not all_finite(made):
            what = f'"{change.op}" from "{change.x}" would have made "{change.y}"'
            raise Diverged(f"{what} infinite or NaN, and was discarded")
        target.change(Delta(made), number)

    def _sum(self, wanted: Sum) -> float:
        x = self._tables[wanted.x].shard.w
        if wanted.op == "norm1":
            return sum(threads.in_parts(x.size, lambda lo, hi: _norm1(x[lo:hi])))
        y = self._tables[wanted.y].shard.w
        return sum(threads.in_parts(x.size, lambda lo, hi: _dot(x[lo:hi], y[lo:hi])))


def _norm1(x: Array) -> float:
    return float(np.abs(x).sum(dtype=np.float64))


def _dot(x: Array, y: Array) -> float:
    return float(np.dot(x.astype(np.float64, copy=False), y.astype(np.float64, copy=False)))
