"""How a replica comes into a run: registered, model built, joined to every shard; and joined again
when a shard has a new process, or the connection to it is a new one.

    registering -> building the model -> waiting for the servers -> joining -> (loading buffers)
"""

from __future__ import annotations

from dlctl import messages as m
from dlctl.errors import RemoteProtocolError
from dlctl.flat import slice_bounds
from dlctl.machine import Connect
from dlctl.roles.protocol.context import COORDINATOR, Birth, Context
from dlctl.roles.protocol.effects import BuildModel, LoadBuffers, ModelBuilt
from dlctl.roles.worker.shard_client import Identity, ShardClient
from dlctl.vector import to_host

REJOIN_S = 0.1
"""Between two looks whether another worker has initialised a shard."""


def buffers_key(request: int) -> tuple[str, int]:
    """Of a question for the buffers: an answer that was late is not one to the next question."""
    return "buffers", request


class Joining:
    def __init__(self, context: Context, birth: Birth) -> None:
        self.context = context
        self.birth = birth
        self._phase = "registering"
        self.identity: Identity | None = None
        self.model: ModelBuilt | None = None
        self.topology: m.Topology | None = None
        self.channels: list[ShardClient] = []
        self.rejoin_at: float | None = None
        """Set while another worker has to initialise the shards."""
        self.is_complete = False
        """Every shard is joined and the buffers are asked for, or there are none."""
        self.restoring = False
        """The residual of before is on its way."""

    def phase(self) -> str:
        """While a server does not answer: where it should be. Nobody else can see that."""
        silent = next((channel for channel in self.channels if not channel.joined), None)
        return f"joining {silent.peer} at {silent.address}" if silent else self._phase

    def begin(self, now: float) -> None:
        self.context.ask("register", COORDINATOR, self.birth.register(), now)

    def on_welcome(self, message: m.Welcome, now: float) -> bool:
        """False if it is a repeated one."""
        if self.context.retries.done("register", now) is None:
            return False
        self.identity = Identity(self.birth.run_id, message.index, message.term, message.token)
        self._phase = "building the model"
        self.context.do(BuildModel(message.index, message.term))
        return True

    def on_model(self, event: ModelBuilt, now: float) -> None:
        self.model = event
        self._phase = "waiting for the servers"
        ready = m.ModelReady(self.birth.name, event.layout, event.samples)
        self.context.ask("model", COORDINATOR, ready, now)

    def on_topology(self, message: m.Topology, now: float) -> None:
        """Raises RemoteProtocolError if it does not say for every server which key it has."""
        if self.context.retries.done("model", now) is None or self.identity is None:
            return
        if len(message.keys) != len(message.addresses):
            raise RemoteProtocolError("not every server has a key")
        self.topology = message
        self._phase = "joining the servers"
        for shard, (address, key) in enumerate(zip(message.addresses, message.keys, strict=True)):
            channel = ShardClient(shard, self.identity, self.context.retries)
            channel.address = address
            self.channels.append(channel)
            self.context.do(Connect(channel.peer, address, key), channel.join(now))

    def on_moved(self, message: m.Moved, now: float) -> None:
        """A shard has a new process: join it, at its new address."""
        if message.shard >= len(self.channels):
            return  # Nobody has told us yet where the servers are.
        noted = m.MovedNoted(self.birth.name, message.shard, message.generation)
        self.context.send(COORDINATOR, noted)
        channel = self.channels[message.shard]
        if message.generation > max(channel.generation, channel.moved_to):
            channel.moved_to, channel.address = message.generation, message.address
            connect = Connect(channel.peer, message.address, message.key)
            self.context.do(connect, channel.join(now))

    def on_reconnected(self, peer: str, lost_at: float, now: float) -> None:
        """A server hears nobody over a connection that it does not know yet: it is joined again,
        also if that was being done, and what else it was sent follows when it has answered.
        """
        joins = [channel.join(now) for channel in self.channels if channel.peer == peer]
        self.context.do(*joins)
        if not joins:
            self.context.again(peer, lost_at, now)

    def on_join_again(self, message: m.JoinAgain, now: float) -> None:
        self.context.do(*self.channels[message.shard].on_join_again(message.generation, now))

    def on_joined(self, message: m.Joined, now: float) -> bool:
        """Whether anybody waited for it.

        Raises RemoteProtocolError if the server's slice is not what it must be.
        """
        assert self.model is not None
        channel = self.channels[message.shard]
        bounds = slice_bounds(len(self.model.parameters), len(self.channels), message.shard)
        if (message.lo, message.hi) != bounds:
            raise RemoteProtocolError(f"its slice is {message.lo}:{message.hi}")
        sends = channel.on_joined(message, now)
        if sends is None:
            return False
        self.context.do(*sends)
        if not channel.initialised:
            self._initialise_or_wait(channel, now)
        elif not self.is_complete and all(c.joined and c.initialised for c in self.channels):
            self.is_complete = True
            self._ask_for_buffers(channel.identity, now)
        return True

    def _initialise_or_wait(self, channel: ShardClient, now: float) -> None:
        assert self.model is not None
        assert self.topology is not None
        if not self.topology.initialise:
            self.rejoin_at = now + REJOIN_S
            return
        model, me = self.model, channel.identity
        values = to_host(model.parameters)[channel.lo : channel.hi].copy()
        extras = (model.averaged, model.constant)
        averaged, constant = extras if channel.shard == 0 else (extras[0][:0], extras[1][:0])
        initialise = m.Initialise(me.slot, me.epoch, values, averaged, constant)
        nbytes = values.nbytes + averaged.nbytes + constant.nbytes
        self.context.ask(("join", channel.shard), channel.peer, initialise, now, nbytes)

    def _ask_for_buffers(self, me: Identity, now: float) -> None:
        """BatchNorm goes on with the run's statistics, not with new ones."""
        if self.has_buffers():
            self._phase = "loading the buffers"
            request = m.FetchBuffers(me.slot, me.epoch, 0)
            self.context.ask(buffers_key(0), "server-0", request, now, self._buffers_bytes())

    def _buffers_bytes(self) -> int:
        assert self.model is not None
        return self.model.averaged.nbytes + self.model.constant.nbytes

    def has_buffers(self) -> bool:
        return bool(self._buffers_bytes())

    def on_buffers(self, message: m.Buffers, now: float) -> bool:
        """False if nobody waits for them, or only for newer ones.

        Raises RemoteProtocolError if they do not fit.
        """
        assert self.model is not None
        sizes = (message.averaged.size, message.constant.size)
        if sizes != (self.model.averaged.size, self.model.constant.size):
            raise RemoteProtocolError(f"it has {sizes} averaged and constant values")
        return self.context.retries.done(buffers_key(message.request), now) is not None

    def load(self, message: m.Buffers) -> None:
        self.context.do(LoadBuffers(message.averaged, message.constant))

    def restores(self) -> str:
        """The checkpoint that has this worker's residual; "" if there is none."""
        return self.topology.restore if self.topology is not None else ""

    def begin_to_restore(self) -> None:
        self.restoring = True
        self._phase = "loading what it had not pushed"

    def on_deadline(self, now: float) -> None:
        if self.rejoin_at is not None and self.rejoin_at <= now:
            self.rejoin_at = None
            self.context.do(*(c.join(now) for c in self.channels if not c.initialised))
