"""Methods that the coordinator drives: vector operations on all shards, and whole-batch gradients.

The method is a generator (`Lead.drive`). An operation goes to every shard and is done when all have
answered; partial sums are added in float64 in shard order, so that the result does not depend on
the order of arrival. A batch is one data epoch, leased like any other.

The journal is everything that was sent into the generator since its newest snapshot. It is on
record before the next request leaves. The next coordinator, or a run that resumes from a
checkpoint, replays the journal to a new generator and repeats the current request with its old
number, by which the shards know whether they have executed it.

While a checkpoint is being written no new request begins: each shard is saved with all of the
current request or none of it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

from dlctl.algorithms.base import (
    BatchRequest,
    Change,
    DriveSnapshot,
    Driving,
    Lead,
    Sum,
    Table,
    VectorRequest,
)
from dlctl.algorithms.tables import PARTS_MAX
from dlctl.roles.coordinator.pools.batch_pool import BatchPool
from dlctl.roles.coordinator.pools.portions import PortionPool
from dlctl.roles.protocol.context import Context
from dlctl.wire import messages as m
from dlctl.wire.messages import Json

LATE_S = 2.0
"""An operation that takes longer is shown in `status`, with the shards that have not answered."""
_CHANGES, _SUMS = {"copy", "axpy"}, {"dot", "norm1"}


class Driven:
    """What the coordinator has of a method that it drives: its batches, and its generator once the
    workers have been released.
    """

    def __init__(self, context: Context, lead: Lead, tables: Sequence[Table], servers: int) -> None:
        self.context = context
        self.lead = lead
        self.tables = tables
        self.servers = servers
        self.journal: Json = {}
        """The journal of the checkpoint, or of the previous coordinator."""
        self._pool: BatchPool | None = None
        self._method: DrivenMethod | None = None

    def supply(self, samples: int, portion_samples: int) -> BatchPool:
        """The dataset is known: its supply of batches."""
        self._pool = BatchPool(samples, portion_samples)
        return self._pool

    def begin(self) -> None:
        """Start or resume the method, if the dataset is known."""
        if self._pool is not None:
            self._pool.limit = 0
            self._method = DrivenMethod(
                self.context, self.lead, self._pool, self.tables, self.servers, self.journal
            )

    @property
    def has_begun(self) -> bool:
        return self._method is not None

    @property
    def over(self) -> str:
        """Why the method has ended; "" while it runs."""
        return self._method.over if self._method is not None else ""

    @property
    def failed(self) -> str:
        """Why it cannot continue; "" if it can."""
        return self._method.failed if self._method is not None else ""

    def advance(self, now: float) -> bool:
        """Begin its current request if needed; False: it has not begun. Must not be called during
        a checkpoint.
        """
        if self._method is not None:
            self._method.advance(now)
        return self.has_begun

    def on_result(self, result: m.VectorResult, now: float) -> None:
        if self._method is not None:
            self._method.on_result(result, now)

    def on_portion(self, done: m.PortionDone) -> None:
        if self._method is not None:
            self._method.on_portion(done)

    def waits_for(self, now: float) -> str:
        return self._method.waits_for(now) if self._method is not None else ""

    def journaled(self) -> tuple[Json, Json]:
        """The lead's state, and the journal of what has been sent into the generator since."""
        if self._method is None:
            return self.lead.state(), self.journal
        return self._method.snapshot, self._method.to_json()


class DrivenMethod:
    def __init__(
        self,
        context: Context,
        lead: Lead,
        pool: PortionPool,
        tables: Sequence[Table],
        servers: int,
        journal: Json,
    ) -> None:
        """lead: in the state of its newest snapshot. journal: from `to_json`; {} for a new run. If
        the size of portions or the number of shards has changed, it is unknown which portions of
        the current batch are in the sums: the batch starts over.
        """
        self.context = context
        self.lead = lead
        self.pool = pool
        self.servers = servers
        self.over = ""
        """Why the method has ended; "" while it runs."""
        self.failed = ""
        """Why it cannot continue; "" if it can."""
        self._rules = {table.name: table.rule for table in tables}
        self._drives = lead.drive()
        self.snapshot = lead.state()
        """The lead's state at the newest snapshot, to which the journal is replayed."""
        self._first = (journal.get("number", 0), journal.get("clock", -1))
        """The numbers of the last operation and the last batch before the newest snapshot."""
        self._number, self._clock = self._first
        self._results: list[tuple[int, list[str]]] = []
        """Fingerprint and result of each request since the snapshot."""
        self._loss = 0.0
        """The sum of the present batch's losses so far."""
        self._partials: dict[int, tuple[float, ...]] = {}
        self._request: VectorRequest | BatchRequest | None = None
        """The current request."""
        self._begun_at: float | None = None
        self._check_parts()
        self._replay(journal)

    def _check_parts(self) -> None:
        if self.pool.per_epoch > PARTS_MAX:
            self.failed = (
                f"a batch has {self.pool.per_epoch} portions; at most {PARTS_MAX} are possible: "
                "make them larger with data.portion_batches"
            )

    def to_json(self) -> Json:
        """The journal of the generator, for a checkpoint."""
        number, clock = self._first
        return {
            "number": number, "clock": clock, "results": [*self._results], "loss": repr(self._loss),
            "cut": self._cut(),
        }  # fmt: skip

    def _cut(self) -> list[int]:
        return [self.pool.portion_samples, self.servers]

    def waits_for(self, now: float) -> str:
        """Which operation is late, and the servers it waits for; "" if none is."""
        is_late = self._begun_at is not None and now >= self._begun_at + LATE_S
        if not is_late or self.over or not isinstance(self._request, VectorRequest):
            return ""
        late = [f"server-{shard}" for shard in range(self.servers) if shard not in self._partials]
        return f"{', '.join(late)} (vector operation {self._number})"

    # ------------------------------------------------------------ the generator

    def _replay(self, journal: Json) -> None:
        self._resume(None)
        for fingerprint, result in journal.get("results", []):
            if self.over or self.failed:
                return
            if fingerprint != _fingerprint(self._request):
                self.failed = (
                    "the method's requests differ from those in its journal: go back to the "
                    "options that it had then, or begin a new run with dlctl start --fresh"
                )
                return
            self._resume(result)
        if not isinstance(self._request, BatchRequest):
            return
        if journal.get("cut", self._cut()) == self._cut():
            self._loss = float(journal.get("loss", "0"))
            return
        self.pool.limit = (self._clock + 1) * self.pool.per_epoch
        self.pool.drop(before=self._clock + 1)
        self._clock += 1
        self._first = (self._first[0], self._first[1] + 1)

    def _resume(self, result: list[str] | None) -> None:
        """Send the current request's result (None: no request) and take the next request."""
        value: Any = None
        if result is not None:
            self._results.append((_fingerprint(self._request), result))
            value = tuple(map(float, result))
            if isinstance(self._request, BatchRequest):
                value = (value[0], int(value[1]))
        self._request, self._begun_at = None, None
        try:
            self._take(self._drives.send(value))
        except StopIteration as end:
            self.over = end.value
        except Exception as error:  # The method's own; it would crash every later coordinator.
            where = type(self.lead).__module__
            self.failed = f"{where}: drive() has failed: {type(error).__name__}: {error}"

    def _take(self, request: Driving) -> None:
        """Make this the current request; `advance` begins it."""
        while isinstance(request, DriveSnapshot):
            self.snapshot, self._results = self.lead.state(), []
            self._first = (self._number, self._clock)
            request = self._drives.send(None)
        self._request = request
        if isinstance(request, BatchRequest):
            self._clock += 1
            self._loss = 0.0
        else:
            self._number += 1
            self._partials = {}
            self._check(request)

    def _check(self, request: VectorRequest) -> None:
        """Raises ValueError for an invalid request of the method."""
        for change in request.changes:
            rules = self._rules.get(change.x), self._rules.get(change.y)
            if change.op not in _CHANGES or None in rules or rules[1] not in ("lead", "parts"):
                raise ValueError(f"{change} is no operation on its tables")
        for each in request.sums:
            names = {each.x} if each.op == "norm1" else {each.x, each.y}
            if each.op not in _SUMS or names - self._rules.keys():
                raise ValueError(f"{each} is no operation on its tables")

    # ------------------------------------------------------------ its requests

    def advance(self, now: float) -> None:
        """Begin the current request if needed. Must not be called during a checkpoint."""
        while self._begun_at is None and not self.over and not self.failed:
            self._begun_at = now
            if isinstance(self._request, BatchRequest):
                self.pool.limit = (self._clock + 1) * self.pool.per_epoch
                self._end_batch()
            else:
                self._ask(now)

    def _ask(self, now: float) -> None:
        assert isinstance(self._request, VectorRequest)
        changes, sums = self._request.changes, self._request.sums
        every: tuple[Change | Sum, ...] = (*changes, *sums)
        op = m.VectorOp(
            self._number,
            tuple(each.op for each in every),
            tuple(each.x for each in every),
            tuple(each.y for each in every),
            (*(float(change.a) for change in changes), *(0.0 for _ in sums)),
        )
        for shard in range(self.servers):
            self.context.ask(("vector", shard), f"server-{shard}", op, now)

    def on_result(self, result: m.VectorResult, now: float) -> None:
        """A shard's result. If the shard has executed more operations than are on record, the
        coordinator's disk has lost writes.
        """
        request = self._request
        if result.newest > self._number:
            self.failed = (
                f"server-{result.shard} has done vector operation {result.newest}, and the records "
                f"of the coordinator end at {self._number}: its disk has lost the rest; "
                "dlctl start resumes from the newest checkpoint"
            )
        if self._begun_at is None or not isinstance(request, VectorRequest):
            return
        if result.number != self._number or result.shard in self._partials:
            return
        if result.shard >= self.servers or len(result.sums) != len(request.sums):
            return
        self.context.retries.done(("vector", result.shard), now)
        self._partials[result.shard] = result.sums
        if len(self._partials) == self.servers:
            in_order = [self._partials[shard] for shard in range(self.servers)]
            self._resume([repr(sum(partials)) for partials in zip(*in_order, strict=True)])

    def on_portion(self, done: m.PortionDone) -> None:
        """A portion of the batch is done, for the first time."""
        start, stop = self.pool.bounds(done.portion)
        is_good = done.samples == stop - start and math.isfinite(done.loss_sum)
        self._loss += done.loss_sum if is_good else math.inf
        self._end_batch()

    def _end_batch(self) -> None:
        if (
            isinstance(self._request, BatchRequest)
            and self._begun_at is not None
            and self.pool.is_finished()
        ):
            self._resume([repr(self._loss), repr(self.pool.samples)])


def _fingerprint(request: VectorRequest | BatchRequest | None) -> int:
    """Identifies a request: a journaled result is valid only for the request it answered."""
    return zlib.crc32(repr(request).encode())
