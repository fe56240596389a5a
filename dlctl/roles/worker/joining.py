"""How a replica joins a run: it registers, builds the model, and joins every server. It rejoins
when a shard has a new process, or a new connection. Without servers there is nothing to join.

    registering -> building the model -> waiting for the servers -> (loading frozen parameters)
        -> joining -> (loading buffers)
"""

from __future__ import annotations

from dataclasses import replace

from dlctl.algorithms.base import Shape
from dlctl.errors import RemoteProtocolError
from dlctl.job.config import JobFile
from dlctl.model import cut
from dlctl.model.flat import Layout
from dlctl.model.vector import to_host
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import (
    BuildModel,
    FrozenWritten,
    LoadFrozen,
    ModelBuilt,
    WriteFrozen,
)
from dlctl.roles.worker.flights import Flights
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.shard_client import Identity, ServerLink, ShardClient
from dlctl.shards.rows import RowSlice, RowTables
from dlctl.wire import messages as m
from dlctl.wire.machine import Connect, Exit, Note
from dlctl.wire.messages import Register

WRITING = "writing the frozen parameters"
"""A phase: the first worker stores them for the run."""
REJOIN_S = 0.1
"""Poll interval while another worker has to initialise a shard."""


def buffers_key(request: int) -> tuple[str, int]:
    """The key of one request for the buffers: a late answer does not match the next one."""
    return "buffers", request


class Joining:
    def __init__(self, context: Context, registration: Register, shape: Shape) -> None:
        self.context = context
        self.registration = registration
        self.shape = shape
        self._phase = "registering"
        self.identity: Identity | None = None
        self.model: ModelBuilt | None = None
        self.topology: m.Topology | None = None
        self.flights = Flights()
        self.links: list[ServerLink] = []
        """One for each server."""
        self.tables: list[list[ShardClient]] = []
        """The clients of each table, in shard order."""
        self.rejoin_at: float | None = None
        """Set while another worker has to initialise the shards."""
        self._is_joined = False
        """Every shard was joined once, and is initialised."""
        self.is_ready = False
        """All shards are joined, and the model has the run's buffers."""
        self._frozen_answer: m.FrozenKept | None = None
        """The last answer, in case it was lost."""

    def phase(self) -> str:
        """While a server does not answer, its address, which only this worker can report."""
        silent = next((link for link in self.links if not link.joined), None)
        return f"joining {silent.peer} at {silent.address}" if silent else self._phase

    def begin(self, now: float) -> None:
        self.context.ask("register", COORDINATOR, self.registration, now)

    def on_welcome(self, message: m.Welcome, now: float) -> bool:
        """Handle the coordinator's welcome; False if it is a duplicate."""
        if self.context.retries.done("register", now) is None:
            return False
        self.identity = Identity(
            self.registration.run_id, message.index, message.term, message.token
        )
        self._phase = "building the model"
        self.context.do(BuildModel(message.index, message.term, message.finds))
        return True

    def on_model(self, event: ModelBuilt, now: float) -> None:
        self.model = event
        self._phase = "waiting for the servers"
        ready = replace(event.ready, name=self.registration.name)
        self.context.ask("model", COORDINATOR, ready, now)

    def on_keep_frozen(self, message: m.KeepFrozen) -> None:
        """Write the frozen parameters; a repeated request gets the same answer."""
        if self._frozen_answer is not None and self._frozen_answer.file == message.file:
            self.context.send(COORDINATOR, self._frozen_answer)
        elif self.model is not None and self._phase != WRITING:
            self._phase, self._frozen_answer = WRITING, None
            self.context.do(WriteFrozen(message.file))

    def on_frozen_written(self, event: FrozenWritten) -> None:
        if self._phase == WRITING:
            self._phase = "waiting for the servers"
        self._frozen_answer = m.FrozenKept(
            self.registration.name, event.file, event.sha256, event.nbytes, event.error
        )
        self.context.send(COORDINATOR, self._frozen_answer)

    def on_topology(self, message: m.Topology, now: float) -> LoadFrozen | None:
        """What has to be loaded before the servers are joined (`join`).

        Raises RemoteProtocolError unless it has a key and a shard per server.
        """
        if self.context.retries.done("model", now) is None or self.identity is None:
            return None
        assert self.model is not None
        if len(message.keys) != len(message.addresses):
            raise RemoteProtocolError("not every server has a key")
        if not cut.fits(message.bounds, len(message.addresses), len(self.model.parameters)):
            raise RemoteProtocolError("the servers' shards are not the model")
        self.topology = message
        if message.frozen != self.model.ready.frozen:
            self._phase = "loading the frozen parameters"
            return LoadFrozen(message.frozen)
        self.join(now)
        return None

    def join(self, now: float) -> None:
        """Join the servers; the model has the run's frozen parameters."""
        message = self.topology
        if message is None or self.identity is None or self.links:
            return
        if not message.addresses:
            self.is_ready = True
            return
        self._phase = "joining the servers"
        for shard, (address, key) in enumerate(zip(message.addresses, message.keys, strict=True)):
            number = message.first + shard
            link = ServerLink(number, self.identity, self.context, address, self.flights)
            self.links.append(link)
            self.context.do(Connect(link.peer, address, key))
            link.join(now)
        assert self.model is not None
        layout, servers = Layout.from_bytes(self.model.ready.layout), len(self.links)
        shards = message.bounds
        for number, table in enumerate(self.shape.of_replicas()):
            clients = []
            for index, link in enumerate(self.links):
                client = ShardClient(link, number, *table.bounds(layout, shards, index))
                if table.of_rows:
                    client.rows = RowSlice(RowTables(layout), servers, index)
                clients.append(client)
            self.tables.append(clients)

    def on_moved(self, message: m.Moved, now: float) -> None:
        """A shard has a new process: join it, at its new address."""
        link = self._link(message.shard)
        if link is None:
            return  # The topology has not arrived yet.
        noted = m.Noted(self.registration.name, f"moved{message.shard}", message.term)
        self.context.send(COORDINATOR, noted)
        if message.term > link.term:
            link.term, link.address = message.term, message.address
            self.context.do(Connect(link.peer, message.address, message.key))
            link.join(now)

    def on_new_bounds(self, message: m.NewBounds, send_queue: SendQueue, now: float) -> bool:
        """All shards have other parts of the model, and new terms, which their answers to a join
        tell. Whether that is news to links that exist. Raises RemoteProtocolError for bounds that
        are not the model's.

        No push of a later step can exist, as no shard has answered with that. If there is one
        nevertheless, this worker exits: its work is done again, and not half of it lost.
        """
        noted = m.Noted(self.registration.name, "bounds", message.number)
        self.context.send(COORDINATOR, noted)
        topology = self.topology
        if self.model is None or topology is None or message.number <= topology.cut:
            return False
        if not cut.fits(message.bounds, len(topology.addresses), len(self.model.parameters)):
            raise RemoteProtocolError("the servers' shards are not the model")
        self.topology = replace(topology, bounds=message.bounds, cut=message.number)
        if not self.links:
            return False
        layout = Layout.from_bytes(self.model.ready.layout)
        for table, clients in zip(self.shape.of_replicas(), self.tables, strict=True):
            for index, client in enumerate(clients):
                lo, hi = table.bounds(layout, message.bounds, index)
                if (lo, hi) == (client.lo, client.hi):
                    continue
                if (step := client.newest_step(send_queue)) >= message.clock:
                    text = f"a push for step {step} is of shards that are at {message.clock}"
                    self.context.do(Note("error", text), Exit(1, text))
                    return False
                client.move(lo, hi, send_queue)
        for link in self.links:
            link.join(now)
        return True

    def _link(self, shard: int) -> ServerLink | None:
        return next((link for link in self.links if link.shard == shard), None)

    def on_reconnected(self, peer: str, lost_at: float, now: float) -> None:
        """A server ignores a new connection until the worker has joined on it: rejoin, even if a
        join was in flight, and resend other messages when the server has answered.
        """
        links = [link for link in self.links if link.peer == peer]
        for link in links:
            link.join(now)
        if not links:
            self.context.retries.again(peer, lost_at, now)

    def on_join_again(self, message: m.JoinAgain, now: float) -> None:
        if link := self._link(message.shard):
            link.on_join_again(message.term, now)

    def on_joined(self, message: m.Joined, now: float) -> bool:
        """Whether the answer was awaited.

        Raises RemoteProtocolError if the server has another slice than expected.
        """
        assert self.model is not None
        link, topology = self._link(message.shard), self.topology
        if link is None or topology is None:
            raise RemoteProtocolError(f"shard {message.shard} is none of this worker's")
        if message.cut != topology.cut:
            return False  # It is asked again once this worker knows the newer one.
        index = message.shard - topology.first
        expected = tuple(topology.base + at for at in topology.bounds[index : index + 2])
        if (message.lo, message.hi) != expected:
            raise RemoteProtocolError(f"its slice is {message.lo}:{message.hi}")
        if not link.on_joined(message, now):
            return False
        if not link.initialised:
            self._initialise_or_wait(link, now)
        elif not self._is_joined and all(each.joined and each.initialised for each in self.links):
            self._is_joined = True
            self.is_ready = not self.model.averaged.nbytes
            if not self.is_ready:  # So that BatchNorm continues with the run's statistics.
                self._phase = "loading the buffers"
                request = m.FetchBuffers(link.identity.slot, link.identity.term, 0)
                nbytes = self.model.averaged.nbytes
                self.context.ask(buffers_key(0), "server-0", request, now, nbytes)
        return True

    def _initialise_or_wait(self, link: ServerLink, now: float) -> None:
        assert self.model is not None
        assert self.topology is not None
        if not self.topology.initialise:
            self.rejoin_at = now + REJOIN_S
            return
        model, me = self.model, link.identity
        of_model = link.clients[0]
        values = to_host(model.parameters)[of_model.lo : of_model.hi].copy()
        averaged = model.averaged if link.shard == 0 else model.averaged[:0]
        initialise = m.Initialise(me.slot, me.term, values, averaged)
        nbytes = values.nbytes + averaged.nbytes
        self.context.ask(("join", link.shard), link.peer, initialise, now, nbytes)

    def is_under_way(self) -> bool:
        """Whether the run had begun, possibly before a stop, when this replica joined."""
        topology = self.topology
        is_announced = topology is not None and (topology.under_way or bool(topology.restore))
        return is_announced or any(link.version for link in self.links)

    def on_buffers(self, message: m.Buffers, now: float) -> bool:
        """Take the servers' buffers; False if they were not awaited, or are stale. Raises
        RemoteProtocolError if they do not fit.
        """
        assert self.model is not None
        if message.averaged.size != self.model.averaged.size:
            raise RemoteProtocolError(f"it has {message.averaged.size} averaged values")
        return self.context.retries.done(buffers_key(message.request), now) is not None

    def batch_size(self, job: JobFile) -> int:
        """Samples of one batch of this worker."""
        assigned = self.topology.batch_size if self.topology is not None else 0
        size = assigned or job.workers.batch_size
        assert isinstance(size, int), "the coordinator has sent it"
        return size

    def restores(self) -> str:
        """The checkpoint that has this worker's residual; "" if there is none."""
        return self.topology.restore if self.topology is not None else ""

    def begin_to_restore(self) -> None:
        """Wait for the residual from before a stop to be loaded: the replica begins after that."""
        self.is_ready, self._phase = False, "loading its unpushed updates"

    def on_deadline(self, now: float) -> None:
        if self.rejoin_at is not None and self.rejoin_at <= now:
            self.rejoin_at = None
            for link in (link for link in self.links if not link.initialised):
                link.join(now)
