"""Fetching slices from the servers: for training, and for concurrent evaluations.

For training a shard sends only the changes since the slice that the worker has. Every answer states
its base version; an answer with another base is discarded, in whatever order answers arrive, and
the whole slice is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlctl.algorithms.base import Arrival
from dlctl.algorithms.needs import Range, View
from dlctl.errors import RemoteProtocolError
from dlctl.model.vector import Vector, copy_into, room_beside
from dlctl.roles.protocol.meters import Latency, Rates
from dlctl.roles.worker.received_slice import Slice
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.shard_client import ShardClient, of_shard
from dlctl.wire.messages import Array, Fetch, FetchRows, Parameters, SparseParameters


@dataclass(slots=True)
class Fetched:
    """A fetch from all shards of a table, or of a range of it, with the answers so far."""

    request: int
    clients: Sequence[ShardClient]
    """The clients of the shards that own a part of the fetched elements."""
    clock_min: int
    part: Range | None = None
    """The range of the table that is fetched; None: all of it."""
    rows: Array | None = None
    """int64[n], ascending: the rows to fetch from tables of rows, instead of a range."""
    whole: bool = False
    """All exact values, to be read beside the model; else only the changes to place there, rounded
    if the job says so."""
    after_own: bool = False
    """Whether the values have to include all own pushes so far."""
    average: bool = False
    """The moving average of the parameters; with `whole`."""
    table: int = 0
    slices: dict[int, Slice] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)
    """Shard -> its clock when it answered."""
    samples: int = 0
    """Samples of all replicas in the newest of these answers."""
    charged: dict[int, int] = field(default_factory=dict)
    """Shard -> expected bytes of its answer."""
    is_held: bool = False
    """Its answers are to be late: their times are not those of fetches."""
    of_cut: int = 0
    """The cut of the model whose shards these clients had when they were asked."""
    ranges: dict[int, Range] = field(default_factory=dict)
    """Shard -> the requested elements of it, by their positions in the table."""

    @property
    def complete(self) -> bool:
        return len(self.clocks) == len(self.clients)

    def within(self, client: ShardClient) -> Range:
        """The elements of it that are on this shard, by their positions in the table."""
        lo, hi = self.part or (client.lo, client.hi)
        return max(lo, client.lo), min(hi, client.hi)

    def begin(self, request: int, clients: Sequence[ShardClient], of_cut: int) -> None:
        """Ask these, under another number; there is no answer yet."""
        self.request, self.clients, self.of_cut = request, clients, of_cut
        self.ranges = {client.shard: self.within(client) for client in clients}
        self.slices, self.clocks, self.charged = {}, {}, {}

    def view(self) -> View:
        return View(min(self.clocks.values()), max(self.clocks.values()))


class Fetcher:
    def __init__(
        self, tables: Sequence[Sequence[ShardClient]], send_queue: SendQueue, rates: Rates
    ) -> None:
        """tables: the clients of each table, in the order of their shards."""
        self.tables = tables
        self.send_queue = send_queue
        self.rates = rates
        self.latency = Latency()
        self.placed: Callable[[ShardClient, Slice, Vector], None] = lambda *_: None
        """Called when a slice was placed in the model; for checkers."""
        self._requests = self._cut = 0
        self._in_flight: dict[int, Fetched] = {}
        self._model_changes = True

    def model_changes(self, changes: bool) -> None:
        """Whether the method may change the model itself; to be called before it does."""
        self._model_changes = changes
        if changes and self.tables:
            for client in self.tables[0]:
                client.basis.will_change()

    def start(
        self,
        clock_min: int,
        *,
        table: int = 0,
        part: Range | None = None,
        whole: bool = False,
        after_own: bool = False,
        average: bool = False,
        rows: Array | None = None,
        is_held: bool = False,
    ) -> Fetched:
        """Request from every shard its slice of a table or of a range, or its part of these rows;
        the requests are sent with the queue. See `Fetched`.
        """
        fetched = Fetched(
            0, (), clock_min, part, rows, whole, after_own, average, table, is_held=is_held
        )  # fmt: skip
        self._begin(fetched)
        return fetched

    def _begin(self, fetched: Fetched) -> None:
        self._requests += 1
        clients, part, rows = self.tables[fetched.table], fetched.part, fetched.rows
        if part is not None:
            clients = [c for c in clients if max(part[0], c.lo) < min(part[1], c.hi)]
        if rows is not None:
            clients = [c for c in clients if _rows_of(c, rows).size]
        fetched.begin(self._requests, clients, self._cut)
        self._in_flight[fetched.request] = fetched
        for client in clients:
            self._request(fetched, client)

    def drop(self, fetched: Fetched) -> None:
        """Wait for its answers no more. A server that holds it may still send one."""
        if self._in_flight.pop(fetched.request, None) is not None:
            for client in fetched.clients:
                self.send_queue.drop(client.fetch_key(fetched.request))

    def cut_anew(self) -> None:
        """The shards have other parts of the model: what is under way is asked anew."""
        self._cut += 1
        for fetched in list(self._in_flight.values()):
            del self._in_flight[fetched.request]
            for client in fetched.clients:
                self.send_queue.drop(client.fetch_key(fetched.request))
            self._begin(fetched)

    def _request(self, fetched: Fetched, client: ShardClient, *, again: bool = False) -> None:
        """again: the changes received do not fit the basis, so the whole slice is needed."""
        message = self._message(fetched, client, again)
        nbytes = fetched.charged[client.shard] = client.expected_bytes(message)
        key = client.fetch_key(fetched.request)
        self.send_queue.queue(key, client.peer, message, nbytes, is_held=fetched.is_held)

    def _message(self, fetched: Fetched, client: ShardClient, again: bool) -> Fetch | FetchRows:
        me = client.identity
        of = (me.slot, me.term, fetched.request, fetched.clock_min)
        after = client.next_seq if fetched.after_own and not again else 0
        if fetched.rows is not None:
            assert client.rows is not None
            numbers = (_rows_of(client, fetched.rows) - client.rows.lo).astype(client.rows.dtype)
            return FetchRows(*of, client.table, numbers, after)
        is_whole = fetched.whole or fetched.part is not None or again
        have = (0, 0) if is_whole else (client.basis.term, client.basis.version)
        lo, hi = fetched.within(client)
        part = (0, 0) if fetched.part is None else (lo - client.lo, hi - client.lo)
        exact = fetched.whole and not again
        return Fetch(*of, *have, exact, client.table, *part, after, fetched.average)

    def on_parameters(self, message: Parameters | SparseParameters, now: float) -> None:
        """A slice has arrived; a duplicate or unknown one is dropped.

        Raises RemoteProtocolError if it does not fit the shard.
        """
        if message.table >= len(self.tables):
            raise RemoteProtocolError(f"there is no table {message.table}")
        client = of_shard(self.tables[message.table], message.shard)
        answer = client.on_parameters(message, now)
        fetched = self._in_flight.get(message.request)
        if answer is None or fetched is None:
            return
        if not fetched.is_held:
            self.latency.add(answer.took_s)
        self.rates.add("fetch_bytes", answer.nbytes, client.peer)
        correction = answer.nbytes - fetched.charged[message.shard]
        self.send_queue.limiters["fetch"].spend(correction, now)
        fetched.slices[message.shard] = answer.slice
        fetched.clocks[message.shard] = answer.clock
        fetched.samples = max(fetched.samples, answer.samples)
        if fetched.complete:
            del self._in_flight[message.request]

    def place(self, fetched: Fetched, parameters: Vector, arrival: Arrival) -> None:
        """Place the received slices in the model, which the next gradients use. `arrival` gets the
        bounds of every slice, before and after it is placed.
        """
        if fetched.of_cut != self._cut and fetched.complete:
            self._begin(fetched)
            return
        for client in fetched.clients:
            arrived = fetched.slices.pop(client.shard, None)
            if arrived is None:
                continue
            if not client.basis.fits(arrived):
                self._in_flight[fetched.request] = fetched
                del fetched.clocks[client.shard]
                self._request(fetched, client, again=True)
                continue
            lo, hi = fetched.within(client)
            model = parameters[lo:hi]
            arrival.before(lo, hi)
            if fetched.part is None:
                client.basis.place(arrived, model, keep=self._model_changes)
            else:
                copy_into(model, arrived.values)
                client.basis.forget()  # A range of the model is newer than the rest.
            self.placed(client, arrived, model)
            arrival.after(lo, hi)

    def assemble(self, fetched: Fetched, model: Vector) -> Array:
        """float32[n] beside the model: the values of a complete fetch with `whole`, which `fetched`
        then drops.
        """
        if fetched.rows is not None:
            parts = [fetched.slices.pop(client.shard).values for client in fetched.clients]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        bounds = [fetched.ranges[client.shard] for client in fetched.clients]
        first, last = min(lo for lo, _ in bounds), max(hi for _, hi in bounds)
        into = room_beside(model, first, last)
        for client, (lo, hi) in zip(fetched.clients, bounds, strict=True):
            arrived = fetched.slices.pop(client.shard)
            assert arrived.where is None
            copy_into(into[lo - first : hi - first], arrived.values)
        return into


def _rows_of(client: ShardClient, rows: Array) -> Array:
    """The rows that are on this shard."""
    assert client.rows is not None
    i, j = client.rows.part(rows)
    return rows[i:j]
