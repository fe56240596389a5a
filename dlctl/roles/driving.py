"""Methods that the coordinator drives: vector operations on all shards, and whole-batch gradients.

The method is a generator (`CoordinatorSide.drive`). An operation goes to every shard and is done
when all have answered; partial dot products are added in float64 in shard order, so that the result
does not depend on who was first. A batch is one epoch of portions, leased like any other data.
"""

from __future__ import annotations

from dlctl import messages as m
from dlctl.algorithms.base import BatchRequest, Drives, VectorRequest
from dlctl.roles.desk import Desk
from dlctl.roles.leases import PortionPool


class Driving:
    def __init__(self, desk: Desk, drives: Drives, servers: int, pool: PortionPool) -> None:
        """`pool` is made anew for every batch, with the samples and portions of this one."""
        self.desk = desk
        self.servers = servers
        self.finished = False
        self.pool = pool
        self._drives = drives
        self._request: VectorRequest | BatchRequest | None = None
        self._number = 0
        self._partials: dict[int, float] = {}
        self._losses: dict[int, float] = {}

    def start(self, now: float) -> None:
        self._begin(next(self._drives), now)

    def _begin(self, request: VectorRequest | BatchRequest, now: float) -> None:
        self._request = request
        if isinstance(request, BatchRequest):
            self._losses = {}
            samples, portion = self.pool.samples, self.pool.portion_samples
            self.pool = PortionPool(samples, portion, first_epoch=request.clock)
            self.pool.limit = self.pool.per_epoch
            return
        self._number += 1
        self._partials = {}
        op = m.VectorOp(self._number, request.op, float(request.a), request.x, request.y)
        for shard in range(self.servers):
            self.desk.ask(("vector", shard), f"server-{shard}", op, now)

    def on_result(self, result: m.VectorResult, now: float) -> None:
        if result.number != self._number or result.shard in self._partials:
            return
        self.desk.outstanding.done(("vector", result.shard), now)
        self._partials[result.shard] = result.partial
        if len(self._partials) == self.servers:
            self._resume(sum(self._partials[shard] for shard in range(self.servers)), now)

    def on_portion(self, portion: int, loss_sum: float, now: float) -> None:
        """A portion of the batch is done, for the first time."""
        self._losses[portion] = loss_sum
        if self.pool.is_finished() and isinstance(self._request, BatchRequest):
            total = sum(self._losses[p] for p in sorted(self._losses))
            self._resume((total, self.pool.samples), now)

    def _resume(self, value: float | tuple[float, int], now: float) -> None:
        try:
            self._begin(self._drives.send(value), now)
        except StopIteration:
            self.finished = True
