"""Methods that the coordinator drives: vector operations on all shards, and whole-batch gradients.

The method is a generator (`Lead.drive`). An operation goes to every shard and is done
when all have answered; partial sums are added in float64 in shard order, so that the result does
not depend on who was first. A batch is one epoch of portions, leased like any other data.
"""

from __future__ import annotations

import math

from dlctl import messages as m
from dlctl.algorithms.base import BatchRequest, Drives, VectorRequest
from dlctl.roles.coordinator.leases import PortionPool
from dlctl.roles.protocol.context import Context


class DrivenMethod:
    def __init__(
        self, context: Context, drives: Drives, servers: int, samples: int, portion_samples: int
    ) -> None:
        """samples: of the dataset. portion_samples: at most so many in a portion."""
        self.context = context
        self.servers = servers
        self.pool = PortionPool(samples, portion_samples, limit=0)
        """The portions of the batch; between two batches there is nothing left in it."""
        self.over = ""
        """Why the method has come to its end; "" while it goes on."""
        self._drives = drives
        self._clock = -1
        self._number = 0
        self._partials: dict[int, float] = {}
        self._losses: dict[int, float] = {}

    def start(self, now: float) -> None:
        self._begin(next(self._drives), now)

    def _begin(self, request: VectorRequest | BatchRequest, now: float) -> None:
        if isinstance(request, BatchRequest):
            self._begin_batch(request.clock)
            return
        self._number += 1
        self._partials = {}
        op = m.VectorOp(self._number, request.op, float(request.a), request.x, request.y)
        for shard in range(self.servers):
            self.context.ask(("vector", shard), f"server-{shard}", op, now)

    def _begin_batch(self, clock: int) -> None:
        assert clock > self._clock, "every batch has a greater clock than the one before"
        self._clock = clock
        self._losses = {}
        samples, portion_samples = self.pool.samples, self.pool.portion_samples
        self.pool = PortionPool(samples, portion_samples, first_epoch=clock)
        self.pool.limit = self.pool.per_epoch

    def on_result(self, result: m.VectorResult, now: float) -> None:
        if result.number != self._number or result.shard in self._partials:
            return
        self.context.retries.done(("vector", result.shard), now)
        self._partials[result.shard] = result.partial
        if len(self._partials) == self.servers:
            self._resume(sum(self._partials[shard] for shard in range(self.servers)), now)

    def on_portion(self, done: m.PortionDone, now: float) -> None:
        """A portion of the batch is done, for the first time."""
        start, stop = self.pool.bounds(done.portion)
        is_good = done.samples == stop - start and math.isfinite(done.loss_sum)
        self._losses[done.portion] = done.loss_sum if is_good else math.inf
        if self.pool.is_finished():
            total = sum(self._losses[portion] for portion in sorted(self._losses))
            self._resume((total, self.pool.samples), now)

    def _resume(self, value: float | tuple[float, int], now: float) -> None:
        try:
            self._begin(self._drives.send(value), now)
        except StopIteration as end:
            self.over = end.value
