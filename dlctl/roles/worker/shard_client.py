"""A worker's conversation with the shards: join, push in order, settle acks, fetch.

Pushes are numbered densely from 0 per (slot, term, table, shard), and each is stored until an ack
settles it. The shard applies strictly the next number, so a duplicate is never applied and a loss
is never skipped: on a gap everything from the expected number on is resent, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dlctl.compress.plain import nothing
from dlctl.errors import RemoteProtocolError
from dlctl.roles.protocol.context import EXIT_FENCED, Context
from dlctl.roles.protocol.limits import REACH
from dlctl.roles.worker import flights
from dlctl.roles.worker.flights import Flights
from dlctl.roles.worker.received_slice import Basis, Slice, answer_bytes, slice_in
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.shards.rows import RowSlice
from dlctl.wire import messages as m
from dlctl.wire.machine import Exit

WINDOW = 4
"""Unacknowledged pushes per shard: bounds the memory of a worker."""
SETTLED = (m.DUPLICATE, m.APPLIED, m.BUFFERED, m.LATE, m.REFUSED)
"""Outcomes of a push: of several ranges on one shard, the receipt has the last of these."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker's identity: issued by the coordinator, presented to every server."""

    run_id: str
    slot: int
    term: int
    token: bytes


class FetchAnswer(NamedTuple):
    """The answer of one shard to a fetch."""

    slice: Slice
    clock: int
    samples: int
    nbytes: int
    took_s: float


class ServerLink:
    """The connection of a worker to one server, joined once for all its tables."""

    def __init__(
        self, shard: int, identity: Identity, context: Context, address: str = "",
        measured: Flights | None = None,
    ) -> None:  # fmt: skip
        self.shard = shard
        self.peer = f"server-{shard}"
        self.address = address
        """The address of the server."""
        self.identity = identity
        self.context = context
        self.flights = measured or Flights()
        self.clients: list[ShardClient] = []
        """One for each table."""
        self.joined = False
        self.initialised = False
        self.version = 0
        """The version of the parameters when the shard was joined."""
        self.term = 0
        """The newest one of its server that is known; older ones are replaced."""

    def join(self, now: float) -> None:
        self.joined = False
        me = self.identity
        join = m.Join(me.run_id, me.slot, me.term, me.token)
        self.context.ask(("join", self.shard), self.peer, join, now)

    def on_join_again(self, term: int, now: float) -> None:
        """The shard does not know this worker. It reports that for every message; join once."""
        if term >= self.term and self.joined:
            self.join(now)

    def on_joined(self, message: m.Joined, now: float) -> bool:
        """The server's answer to a join; False if it is stale.

        Pushes that the server has received are settled by their acks, which are resent.
        """
        is_stale = message.term < self.term
        if is_stale or self.context.retries.done(("join", self.shard), now) is None:
            return False
        self.context.retries.again(self.peer, now, now)
        self.joined, self.initialised = True, message.initialised
        self.version = message.version
        self.term = message.term
        for client in self.clients:
            client.resend_from(-1, now)
        return True


class ShardClient:
    """The client of one table on one server: numbers, sends and resends pushes, and fetches."""

    def __init__(self, link: ServerLink, table: int = 0, lo: int = 0, hi: int = 0) -> None:
        """[lo, hi): the server's slice of the table."""
        self.link = link
        self.table = table
        self.shard = link.shard
        self.peer = link.peer
        self.identity = link.identity
        self.context = link.context
        self.lo, self.hi = lo, hi
        link.clients.append(self)
        self.rows: RowSlice | None = None
        """The rows of the slice [lo, hi), if the table is one of rows."""
        self.basis = Basis()
        """The slice in the model."""
        self._answer_bytes = 0
        """Bytes of the last answer to a fetch that allowed changes only; 0: there was none."""
        self.base_version = 0
        """The version that the newest gradient was computed with: the base of the next push."""
        self.next_seq = 0
        self._unsettled: dict[int, int] = {}
        """Number of a push -> its bytes, 0 once the shard has them; in ascending order."""
        self._gap_at = -1
        """The number that the shard is missing, until another push is settled."""

    # ------------------------------------------------------------ another cut

    def newest_step(self, send_queue: SendQueue) -> int:
        """The newest step of the pushes that are not acknowledged; -1: there are none."""
        pushes = (self._unacknowledged(seq, send_queue) for seq in self._unsettled)
        return max((push.clock for push in pushes), default=-1)

    def _unacknowledged(self, seq: int, send_queue: SendQueue) -> m.Push:
        key = self.push_key(seq)
        push = self.context.retries.message(key) or send_queue.message(key)
        assert isinstance(push, m.Push)
        return push

    def move(self, lo: int, hi: int, send_queue: SendQueue) -> None:
        """The shard has other elements of the table from now on. The pushes that are not
        acknowledged are for steps that it has made: their outcome is known, and only their numbers
        are sent.
        """
        for seq in self._unsettled:
            push = self._unacknowledged(seq, send_queue)
            instead = replace(push, delta=nothing(push.delta.kind, hi - lo), is_part=False, at=0)
            send_queue.replace(self.push_key(seq), instead)
            self._unsettled[seq] = 0
        self.lo, self.hi = lo, hi
        self.basis, self._answer_bytes = Basis(), 0

    # ------------------------------------------------------------ pushing

    def has_space(self, pushes: int = 1) -> bool:
        """Whether `pushes` more, those of one write, may be in flight: the shard must still know
        the outcome of the oldest one if that is resent."""
        return len(self._unsettled) < WINDOW and self.next_seq + pushes <= self.settled() + REACH

    def bytes_under_way(self) -> int:
        return sum(self._unsettled.values())

    def settled(self) -> int:
        """Every push with a number below this one is settled."""
        return next(iter(self._unsettled), self.next_seq)

    def push(
        self,
        first_step: int,
        last_step: int,
        samples: int,
        clock: int,
        delta: m.Packed,
        portion: int = 0,
        at: int | None = None,
        weight: float = 0.0,
        buffers: m.Packed = m.NO_BUFFERS,
    ) -> m.Push:
        """The next push, which has to be sent through the worker's send_queue under `push_key`."""
        me = self.identity
        seq = self.next_seq
        self.next_seq += 1
        self._unsettled[seq] = delta.nbytes
        return m.Push(
            me.slot, me.term, self.link.term, seq, self.base_version, first_step, last_step,
            samples, clock, delta, portion, self.table, at is not None, at or 0,
            weight, buffers,
        )  # fmt: skip

    def push_key(self, seq: int) -> tuple[str, int, int, int]:
        return ("push", self.table, self.shard, seq)

    def on_ack(self, ack: m.Ack, now: float) -> float | None:
        """Seconds since the push was sent if this ack settles it, else None.

        An ack of an older term is from a replaced server, and is ignored.
        """
        if ack.term < self.link.term:
            return None
        if ack.outcome == m.FENCED:
            self.context.note("warning", f"another process has this slot now: {ack.reason}")
            self.context.do(Exit(EXIT_FENCED, "fenced"))
            return None
        if ack.outcome == m.GAP:
            # Every push behind the lost one reports the same gap; resend once.
            if ack.next_seq != self._gap_at:
                self.resend_from(ack.next_seq, now)
            return None
        if (nbytes := self._unsettled.get(ack.seq, 0)) >= flights.BYTES_MIN:
            sent_at = self.context.retries.sent_once(self.push_key(ack.seq))
            if sent_at is not None:
                self.link.flights.arrived(self.peer, nbytes, sent_at, now)
        if ack.outcome == m.HELD:
            self.context.retries.put_off(self.push_key(ack.seq), now)
            if ack.seq in self._unsettled:
                self._unsettled[ack.seq] = 0
        if ack.outcome == m.HELD or ack.seq not in self._unsettled:
            return None
        if ack.outcome not in SETTLED:
            raise RemoteProtocolError(f'{self.peer} acknowledged with "{ack.outcome}"')
        del self._unsettled[ack.seq]
        self._gap_at = -1
        return self.context.retries.done(self.push_key(ack.seq), now)

    def resend_from(self, seq: int, now: float) -> None:
        """Resend what is not settled from the number on that the shard is missing; -1: all of it,
        since the server knows this worker again.
        """
        self._gap_at = seq
        for key in (self.push_key(s) for s in self._unsettled if s >= seq):
            push = self.context.retries.message(key)
            if isinstance(push, m.Push) and push.shard_term != self.link.term:
                push = replace(push, shard_term=self.link.term)
            self.context.do(*self.context.retries.resend_now(key, now, push))

    # ------------------------------------------------------------ fetching

    def expected_bytes(self, fetch: m.Fetch | m.FetchRows) -> int:
        """Expected size of the answer: that of the last one, or of all requested elements."""
        return (fetch.have_term and self._answer_bytes) or 4 * self._elements(fetch)

    def _elements(self, fetch: m.Fetch | m.FetchRows) -> int:
        """Number of requested elements."""
        if isinstance(fetch, m.FetchRows):
            assert self.rows is not None
            return self.rows.tables.count(fetch.rows.astype(np.int64) + self.rows.lo)
        return fetch.hi - fetch.lo if fetch.hi else self.hi - self.lo

    def fetch_key(self, request: int) -> tuple[str, int, int, int]:
        return ("fetch", self.table, self.shard, request)

    def on_parameters(
        self, message: m.Parameters | m.SparseParameters, now: float
    ) -> FetchAnswer | None:
        """An answer to a fetch; None if it was not awaited, or is of a process that this worker has
        not joined: that may have another part of the model.

        Raises RemoteProtocolError if it does not fit the shard.
        """
        key = self.fetch_key(message.request)
        asked = self.context.retries.message(key)
        is_joined = self.link.joined and message.term == self.link.term
        if not is_joined or not isinstance(asked, m.Fetch | m.FetchRows):
            return None
        arrived = slice_in(message, self._elements(asked))
        have_version = asked.have_version if isinstance(asked, m.Fetch) else 0
        base = (asked.have_term, have_version)
        if arrived.where is not None and (arrived.term, arrived.since) != base:
            return None
        nbytes = answer_bytes(message)
        if asked.have_term:
            self._answer_bytes = nbytes
        took_s = self.context.retries.done(key, now, nbytes)
        if took_s is None:
            return None
        return FetchAnswer(arrived, message.clock, message.samples, nbytes, took_s)


def of_shard(clients: Sequence[ShardClient], shard: int) -> ShardClient:
    """The client of this shard; those of a table are of successive ones."""
    return clients[shard - clients[0].shard]
