"""Writes: pushes to the servers' tables, until every shard has settled them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlctl.algorithms.base import Shape
from dlctl.algorithms.needs import Range, Receipt, Settle, Write
from dlctl.compress.base import Compressor, take
from dlctl.compress.plain import nothing
from dlctl.errors import RemoteProtocolError
from dlctl.model.vector import Vector, copy_of, to_host, zeros_like
from dlctl.roles.protocol.effects import Settled
from dlctl.roles.protocol.limits import REACH
from dlctl.roles.protocol.meters import Latency
from dlctl.roles.worker.accounts import Accounts
from dlctl.roles.worker.links import Links
from dlctl.roles.worker.pacing import PUSH
from dlctl.roles.worker.services.base import Phase, Service, check_ranges, check_rows
from dlctl.roles.worker.services.handed_on import HandedOn
from dlctl.roles.worker.settings import WorkTerms
from dlctl.roles.worker.shard_client import SETTLED, ShardClient, of_shard
from dlctl.shards.rows import KIND as ROWS
from dlctl.wire import messages as m
from dlctl.wire.messages import Array

DIVERGED = "a replica's own steps have led too far; a smaller rate for them may help"


@dataclass(slots=True)
class _Pushed:
    """A write in flight: a push to each shard that has a part of it."""

    table: int
    steps: tuple[int, int]
    """The first and last step in the push."""
    missing: int
    """The number of shards that have not settled the write."""
    is_part: bool = False
    """Whether other writes contain the same steps, too."""
    is_refused: bool = False
    outcomes: dict[int, str] = field(default_factory=dict)


class Writing(Service[Write | Settle]):
    def __init__(
        self,
        links: Links,
        terms: WorkTerms,
        accounts: Accounts,
        shape: Shape,
        model: Vector,
        pushed: Callable[[], None],
    ) -> None:
        """model: float32[d]. pushed: called after parameters were pushed."""
        self.context, self.identity = links.context, links.identity
        self.tables, self.send_queue = links.tables, links.send_queue
        self.shape, self.model, self.pushed = shape, model, pushed
        self.compressor, self.compression = terms.compressor, terms.compression
        self.handed_on: HandedOn | None = None
        """The model's buffers, which go with the pushes if replicas hand them on."""
        self.portions, self.pacing = accounts.portions, accounts.pacing
        self.bad_gradients, self.rates = accounts.bad_gradients, accounts.rates
        self._progress = self.shape.table(self.shape.progress) if self.tables else 0
        """The table whose pushes contain the steps."""
        # A late part of a batch is in the sum already: another replica has pushed it.
        rule = self.shape.tables[self._progress].rule if self.tables else "parts"
        self._drops_late = rule != "parts"
        self.latency = Latency()
        self.staleness_sum = self.staleness_number = 0
        self.steps = 0
        """The steps of this replica so far; the computing service counts them."""
        self.steps_pushed = 0
        """The steps that are completely in pushes, or that are done without one."""
        self._in_parts: deque[int] = deque()
        """The steps before each of the newest writes, if one write is a part of a step."""
        self.newest = -1
        """The number of the newest write that contains all steps before it."""
        self.number = -1
        """The number of the newest write to any table; -1: there was none."""
        self._in_flight: dict[int, _Pushed] = {}
        self._settled_early: list[int] = []
        """Settled writes that wait for the writes before them, which may hold parts of their steps.
        """
        self._numbers: dict[tuple[int, int, int], int] = {}
        """(table, shard, its number there) -> number of the write."""
        self._is_part = False
        """A part of steps was pushed that is not counted yet."""
        self._need: Write | Settle | None = None
        self._is_sent = False
        self._receipt = Receipt({})
        """The outcome of the newest write, once it is settled."""

    # ------------------------------------------------------------ the service

    def begin(self, need: Write | Settle, now: float) -> None:
        """Begin a write, or wait until all are settled. Raises ValueError for too many ranges, or
        ones outside the table.
        """
        self._need, self._is_sent = need, isinstance(need, Settle)
        if isinstance(need, Settle):
            return
        check_ranges(need.ranges, self.tables[self.shape.table(need.table)][-1].hi)
        check_rows(need.rows, self.tables[self.shape.table(need.table)])
        if len(need.ranges) > REACH:
            raise ValueError(f"a write of {len(need.ranges)} ranges; {REACH} are possible")

    def poll(self, now: float) -> tuple[bool, Receipt | Vector | None]:
        need = self._need
        assert need is not None
        if isinstance(need, Write) and not self._is_sent:
            if not self._may_push(need):
                self.pacing.waits(PUSH, now)
                return False, None
            before = copy_of(need.vector) if need.tells else None
            self._push(need, now)
            self._is_sent = True
            if before is not None:
                before -= need.vector
                self.pacing.waits("", now)
                self._need = None
                return True, before
        is_for_receipt = isinstance(need, Settle) or need.wait
        if is_for_receipt and self.number in self._in_flight:
            self.pacing.waits(PUSH, now)
            return False, None
        self.pacing.waits("", now)
        self._need = None
        return True, self._receipt if is_for_receipt else None

    def phase(self) -> Phase:
        return Phase("pushing")

    def settled_until(self, table: int) -> int:
        """All writes to a table up to this number are settled."""
        under_way = (n for n, pushed in self._in_flight.items() if pushed.table == table)
        return min(under_way, default=self.number + 1) - 1

    def is_under_way(self, number: int) -> bool:
        return number in self._in_flight or number in self._settled_early

    def busy(self) -> bool:
        return bool(self._in_flight)

    def has_unpushed_steps(self) -> bool:
        """Whether there are steps that are not completely in pushes."""
        return self.steps != self.steps_pushed

    # ------------------------------------------------------------ pushes

    def _may_push(self, need: Write) -> bool:
        window = self.send_queue.push_window_bytes
        clients = self.tables[self.shape.table(need.table)]
        if window is not None and sum(c.bytes_under_way() for c in clients) >= window:
            return False
        pushes = max(len(need.ranges), 1)  # The most to one shard.
        if need.rows is not None:
            clients = [client for client, _, _ in self._of_rows(need, need.rows)]
        return all(c.link.joined and c.has_space(pushes) for c in clients)

    def _push(self, need: Write, now: float) -> None:
        """Send it to all shards that have a part of it."""
        table = self.shape.table(need.table)
        pieces = self._pieces(need, table)
        self.number += 1
        number, steps = self.number, (self.steps_pushed, max(self.steps - 1, 0))
        self._in_flight[number] = _Pushed(table, steps, len(pieces), need.of > 1)
        for client, lo, values in pieces:
            self._send(client, lo, values, need, number, steps)
        if table == self._progress:
            self.pacing.pushed(number, now)
            self._count(need, number)
            self.pushed()

    def _count(self, need: Write, number: int) -> None:
        """Count the steps that are now pushed completely."""
        if not need.holds_steps:
            self._in_parts.clear()
            return
        if need.ranges and need.of == 1:
            self._is_part = True
            return
        self.newest = number
        has_diverged = not need.ranges and need.vector is None and self.has_unpushed_steps()
        self._in_parts.append(self.steps)
        while len(self._in_parts) >= need.of:
            self.steps_pushed = self._in_parts.popleft()
        self.portions.pushed(number, self.steps_pushed)
        if has_diverged:
            self._refused(number, DIVERGED, "not pushed")

    def is_in_parts(self) -> bool:
        """Whether some steps are pushed partly, and need more writes."""
        return (self._is_part or bool(self._in_parts)) and self.has_unpushed_steps()

    def done(self, but: int) -> None:
        """All steps except the newest `but` count as pushed."""
        self._in_parts.clear()
        self.steps_pushed = self.steps - but
        self._is_part &= but > 0

    def _pieces(self, need: Write, table: int) -> list[tuple[ShardClient, int, Vector | None]]:
        """(shard, first element of the table, its values, or None for zeros); every shard gets a
        part of a whole write, even if its slice is empty.
        """
        clients = self.tables[table]
        if need.rows is not None:
            return self._of_rows(need, need.rows)
        if need.vector is None and not need.ranges and not table:
            return [(c, c.lo, None) for c in clients]
        size = sum(hi - lo for lo, hi in need.ranges) or clients[-1].hi
        vector = need.vector
        if vector is None:
            vector = np.zeros(size, np.float32) if table else zeros_like(self.model[:size])
        if len(vector) != size:
            raise ValueError(f'{len(vector)} elements for {size} of table "{need.table}"')
        if not need.ranges:
            return [(c, c.lo, vector[c.lo : c.hi]) for c in clients]
        pieces: list[tuple[ShardClient, int, Vector | None]] = []
        at = 0
        for lo, hi in need.ranges:
            pieces += _cut(clients, (lo, hi), vector[at : at + hi - lo])
            at += hi - lo
        if need.to_all:
            have = {client.shard for client, _, _ in pieces}
            pieces += [(c, c.lo, vector[:0]) for c in clients if c.shard not in have]
        return pieces

    def _of_rows(self, need: Write, rows: Array) -> list[tuple[ShardClient, int, Vector | None]]:
        """The pieces of a write of rows: only for shards that have some of them."""
        found: list[tuple[ShardClient, int, Vector | None]] = []
        end = 0
        for client in self.tables[self.shape.table(need.table)]:
            assert client.rows is not None
            i, j = client.rows.part(rows)
            begin, end = end, end + client.rows.tables.count(rows[i:j])
            if i < j:
                values = None if need.vector is None else need.vector[begin:end]
                found.append((client, client.lo, values))
        if need.vector is None or len(need.vector) != end:
            raise ValueError(f'not {end} elements for {len(rows)} rows of table "{need.table}"')
        return found

    def _packed_rows(self, client: ShardClient, need: Write, values: Vector) -> m.Packed:
        assert client.rows is not None
        assert need.rows is not None
        i, j = client.rows.part(need.rows)
        numbers = (need.rows[i:j] - client.rows.lo).astype(client.rows.dtype)
        host = to_host(values)
        kept = host if need.given else np.array(host, np.float32)
        return m.Packed(ROWS, client.hi - client.lo, (numbers, kept))

    def _send(
        self,
        client: ShardClient,
        lo: int,
        values: Vector | None,
        need: Write,
        number: int,
        steps: tuple[int, int],
    ) -> None:
        if need.rows is not None and values is not None:
            delta = self._packed_rows(client, need, values)
        elif values is None:
            delta = nothing(self.compression, client.hi - client.lo)
        elif need.given:
            delta = m.Packed(self.compression, len(values), (to_host(values),))
        elif client.table == 0:
            with at_least(self.compressor, need.density_min):
                delta = take(self.compressor, values, client.shard)
        else:
            host = to_host(values).astype(np.float32, copy=False)
            delta = m.Packed("none", len(values), (copy_of(host),))
        at = lo - client.lo if need.ranges else None
        buffers = m.NO_BUFFERS
        if self.handed_on is not None and client.table == client.shard == 0:
            buffers = self.handed_on.packed()
        push = client.push(
            *steps, need.samples, need.clock, delta, need.part, at, need.weight, buffers
        )
        self._numbers[client.table, client.shard, push.seq] = number
        self.rates.add("push_bytes", delta.nbytes, client.peer)
        self.send_queue.queue(client.push_key(push.seq), client.peer, push, delta.nbytes)

    # ------------------------------------------------------------ outcomes

    def on_ack(self, ack: m.Ack, now: float) -> list[int]:
        """A server has acked a push. Returns the numbers of the writes with steps that are settled
        by it. Raises RemoteProtocolError for a table that does not exist.
        """
        if ack.table >= len(self.tables):
            raise RemoteProtocolError(f"there is no table {ack.table}")
        client = of_shard(self.tables[ack.table], ack.shard)
        took_s = client.on_ack(ack, now)
        if took_s is None:
            return []
        if ack.table == 0:
            self.context.do(Settled(self.identity.term, client.shard, client.settled()))
        if ack.table == self._progress:
            self.latency.add(took_s)
            self.staleness_sum += ack.staleness
            self.staleness_number += 1
        number = self._numbers.pop((ack.table, ack.shard, ack.seq))
        if ack.outcome == m.REFUSED:
            self._refused(number, ack.reason, f"server-{ack.shard} refused a push")
        pushed = self._in_flight[number]
        before = pushed.outcomes.get(ack.shard, ack.outcome)
        pushed.outcomes[ack.shard] = max(before, ack.outcome, key=SETTLED.index)
        pushed.missing -= 1
        if not pushed.missing:
            self._settled(number, now)
        # A shard takes whole writes to one table in their order: only others can be behind.
        behind = (n for n, p in self._in_flight.items() if p.is_part or p.table != self._progress)
        oldest, early = next(behind, self.number + 1), self._settled_early
        self._settled_early = [n for n in early if n >= oldest]
        return [n for n in early if n < oldest]

    def _settled(self, number: int, now: float) -> None:
        """Finish a write that all shards have settled."""
        pushed = self._in_flight.pop(number)
        if number == self.number:
            self._receipt = Receipt(pushed.outcomes)
        if not pushed.is_refused:
            self.bad_gradients.accepted(pushed.table)
        if pushed.table != self._progress:
            return
        if self._drops_late and not pushed.is_part and set(pushed.outcomes.values()) == {m.LATE}:
            self.portions.late(number)
        self.pacing.settled(number, now)
        self._settled_early.append(number)

    def _refused(self, number: int, reason: str, what: str) -> None:
        """Record that a shard gets nothing of this write, and why."""
        pushed = self._in_flight[number]
        if not pushed.is_refused:
            self.bad_gradients.refused(reason, *pushed.steps, pushed.table)
        pushed.is_refused = True
        self.portions.refused(number)
        self.context.note("warning", f"{what} ({self.bad_gradients.last}): {reason}")

    # ------------------------------------------------------------ figures

    def metrics(self) -> dict[str, Any]:
        found = self.latency.quantiles_ms("push")
        if self.staleness_number:
            found["staleness_mean"] = round(self.staleness_sum / self.staleness_number, 2)
            found |= {"pushes": self.staleness_number, "staleness_sum": self.staleness_sum}
        return {**found, "refused": self.bad_gradients.pushes}


@contextmanager
def at_least(compressor: Compressor, density: float) -> Iterator[None]:
    """Raise the density of a compressor to at least this value meanwhile."""
    usual = compressor.density
    compressor.density = max(usual, density)
    try:
        yield
    finally:
        compressor.density = usual


def _cut(
    clients: list[ShardClient], part: Range, values: Vector
) -> list[tuple[ShardClient, int, Vector]]:
    pieces = []
    for client in clients:
        lo, hi = max(part[0], client.lo), min(part[1], client.hi)
        if lo < hi:
            pieces.append((client, lo, values[lo - part[0] : hi - part[0]]))
    return pieces
