"""Methods that the coordinator drives: vector operations on all shards, and whole-batch gradients.

The method is a generator (`Lead.drive`). An operation goes to every shard and is done when all have
answered; partial sums are added in float64 in shard order, so that the result does not depend on
who was first. A batch is one data epoch, leased like any other.

Everything that the generator was resumed with since its newest snapshot is the journal. It is on
record before the next request leaves, so the coordinator that takes this one's place, or a run that
goes on from a checkpoint, plays it back to a new generator, and makes the present request again:
with the number that it had, by which the shards know what of it they have done.

While a checkpoint is being made no new request begins: what shards are saved with, early or late,
is the present request or nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlctl import messages as m
from dlctl.algorithms.base import (
    BatchRequest,
    Change,
    Driving,
    Lead,
    Snapshot,
    Sum,
    Table,
    VectorRequest,
)
from dlctl.algorithms.tables import PARTS_MAX
from dlctl.errors import DlctlError
from dlctl.messages import Json
from dlctl.roles.coordinator.leases import PortionPool
from dlctl.roles.protocol.context import Context


class DrivenMethod:
    def __init__(
        self,
        context: Context,
        lead: Lead,
        pool: PortionPool,
        tables: Sequence[Table],
        servers: int,
        journal: Json,
        *,
        is_recut: bool = False,
    ) -> None:
        """lead: in the state of its newest snapshot. journal: as `to_json` told it, {} of a new
        run. is_recut: portions or shards are not those of the journal, so that nobody knows which
        of the present batch are in the sums: it is begun anew.

        Raises DlctlError if the journal does not fit to the method, or a batch has too many
        portions.
        """
        if pool.per_epoch > PARTS_MAX:
            raise DlctlError(
                f"a batch has {pool.per_epoch} portions; at most {PARTS_MAX} are possible",
                hint="larger portions: data.portion_batches",
            )
        self.context = context
        self.lead = lead
        self.pool = pool
        self.servers = servers
        self.over = ""
        """Why the method has come to its end; "" while it goes on."""
        self._names = {table.name for table in tables}
        drives = lead.drive()
        assert drives is not None, "a method that the coordinator drives"
        self._drives = drives
        self._snapshot = lead.state()
        """Of the newest snapshot."""
        self._first = (journal.get("number", 0), journal.get("clock", -1))
        """The numbers of operations, and of batches, before the first one behind it."""
        self._number, self._clock = self._first
        self._results: list[list[str]] = []
        """Of all requests since then."""
        self._loss = 0.0
        """The sum of the present batch's losses so far."""
        self._partials: dict[int, tuple[float, ...]] = {}
        self._request: Driving | None = None
        """The present one."""
        self._is_begun = False
        self._play(journal.get("results", []))
        if is_recut and isinstance(self._request, BatchRequest):
            self.pool.skip_epoch(self._clock)
            self._clock += 1
            self._first = (self._first[0], self._first[1] + 1)
        elif isinstance(self._request, BatchRequest):
            self._loss = float(journal.get("loss", "0"))

    def to_json(self) -> Json:
        """The journal."""
        number, clock = self._first
        return {
            "number": number, "clock": clock, "results": [*self._results], "loss": repr(self._loss),
        }  # fmt: skip

    def state(self) -> Json:
        """The lead's, as the journal begins with it."""
        return self._snapshot

    @property
    def waits_for(self) -> str:
        """What the present request waits for, and whom, for people."""
        if isinstance(self._request, BatchRequest):
            return f"batch {self._clock}"
        late = [f"server-{shard}" for shard in range(self.servers) if shard not in self._partials]
        return f"vector operation {self._number} of {', '.join(late)}"

    # ------------------------------------------------------------ the generator

    def _play(self, results: list[list[str]]) -> None:
        try:
            self._take(next(self._drives))
            for result in results:
                self._result(result)
        except (ValueError, TypeError, IndexError, AssertionError) as error:
            raise DlctlError(f"the journal of the method cannot be played back: {error}") from error
        except StopIteration as end:
            self.over = end.value

    def _take(self, request: Driving) -> None:
        """The next request of the generator, which is not begun yet."""
        while isinstance(request, Snapshot):
            self._snapshot, self._results = self.lead.state(), []
            self._first = (self._number, self._clock)
            request = self._drives.send(None)
        self._request, self._is_begun = request, False
        if isinstance(request, BatchRequest):
            self._clock += 1
            self._loss = 0.0
        else:
            self._number += 1
            self._partials = {}
            self._check(request)

    def _check(self, request: VectorRequest) -> None:
        """Raises DlctlError for what is a mistake of the method: no server could do it."""
        of_changes = [name for change in request.changes for name in (change.x, change.y)]
        of_sums = [name for s in request.sums for name in (s.x, s.y) if name]
        for name in (*of_changes, *of_sums):
            if name not in self._names:
                where = type(self.lead).__module__
                raise DlctlError(f'{where}: drive() names a table "{name}" that there is not')

    def _result(self, result: list[str]) -> None:
        """The present request has come to this; the generator makes the next one."""
        self._results.append(result)
        values = tuple(map(float, result))
        is_batch = isinstance(self._request, BatchRequest)
        self._request = None
        self._take(self._drives.send((values[0], int(values[1])) if is_batch else values))

    def _resume(self, result: list[str]) -> None:
        try:
            self._result(result)
        except StopIteration as end:
            self.over = end.value

    # ------------------------------------------------------------ its requests

    def advance(self, now: float) -> None:
        """Begin the present request, if it is not. Not to be called while a checkpoint is made."""
        while not self._is_begun and not self.over:
            self._is_begun = True
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
        """Raises DlctlError for a request of the method that nobody can do, or if a shard has done
        more than this coordinator knows of: its host has lost what was written.
        """
        request = self._request
        if result.newest > self._number:
            raise DlctlError(
                f"server-{result.shard} has done vector operation {result.newest}, and the records "
                f"of the coordinator end at {self._number}: its disk has lost the rest",
                hint="dlctl start goes on from the newest checkpoint",
            )
        if not self._is_begun or not isinstance(request, VectorRequest):
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
        if isinstance(self._request, BatchRequest) and self._is_begun and self.pool.is_finished():
            self._resume([repr(self._loss), repr(self.pool.samples)])
