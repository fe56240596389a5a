"""A network in virtual time: latency, jitter, bandwidth, loss, duplicates, reordering, partitions,
half-open connections.

Connections behave like ZeroMQ's. One side opens a connection and names its peer; the other side
knows it by an opaque id and can only reply. A restarted listener knows its connections by new ids.
Each direction is first in, first out, and an undeliverable message is lost silently. Every message
goes through the real `dlctl.wire.codec`. As with a zero-copy send, its arrays are not copied before
they arrive: a role that changes them too early is detected. Some pushes are delivered in parts
first (`machine.Coming`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from dlctl.sim.arriving import PushInParts
from dlctl.sim.fabric import CardQueues, Fabric
from dlctl.sim.keys import public_of
from dlctl.sim.timeline import Timeline
from dlctl.wire import codec
from dlctl.wire.kinds import payload_bytes
from dlctl.wire.machine import Coming, Peer
from dlctl.wire.messages import Message, Push

RECONNECT_S = 0.1
"""From a broken connection to a new one."""
IN_PARTS = 0.3
"""Probability that parts of a push are delivered before the whole message."""
PARTS_MAX = 3
HEADER_BYTES = 120
"""Of a usual message that is not encoded."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message on its way."""

    message: Message
    nbytes: int
    frames: codec.Frames | None
    """None: it is passed on as it is."""

    def read(self) -> Message:
        return self.message if self.frames is None else _copied(self.frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimLink:
    """One direction between two daemons."""

    latency_s: float = 0.0005
    jitter_s: float = 0.0
    """Largest addition to the latency, uniformly distributed."""
    bytes_per_s: float | None = None
    loss: float = 0.0
    """Probability that a message is lost; likewise the next two."""
    duplicate: float = 0.0
    reorder: float = 0.0
    """A reordered message arrives up to `late_s` late, after others."""
    late_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    link: SimLink = SimLink()
    """The link of every direction without an entry in `links`."""
    links: Mapping[tuple[str, str], SimLink] = field(default_factory=dict)
    """(from, to) by the names of daemons."""
    tells_of_breaks: bool = True
    """Whether a machine is notified that a connection that it opened was closed: over TCP it is,
    over unix sockets it is not."""
    card_bytes_per_s: float | None = None
    """The rate of each machine's network card, which its messages share (`fabric.py`); then nothing
    is lost, duplicated or delivered in parts."""
    cards: Mapping[str, float] = field(default_factory=dict)
    """Machine -> the rate of its card, if it is another one."""
    cards_are_duplex: bool = True
    """Whether each direction of a card has its rate; else both together have it."""
    payload_scale: float | None = None
    """Messages are passed on without being encoded, and count as many bytes as if their arrays were
    larger by this factor; then none is delivered in parts. None: every message is encoded."""
    cards_are_fair: bool = True
    """Whether flows share a card; else it takes one message after the other, which costs less."""
    machines: Mapping[str, str] = field(default_factory=dict)
    """Daemon -> the machine that it is on, if that is not one of its own."""
    free_ports: bool = False
    """Whether every process of a server listens at another address, as on any free port of a host;
    else all of them at one, as on a unix socket."""


class Endpoint(Protocol):
    """The network's interface of a process."""

    name: str
    alive: bool
    secret: str
    """"": its connections have no keys."""
    agent: str
    """The agent of its host."""
    admitted: Mapping[str, str]
    """Public key -> name of the peers that may connect to it."""

    def deliver(self, peer: Peer, message: Message, identity: str) -> None: ...

    def deliver_part(self, part: Coming) -> None: ...

    def reconnected(self, peer: str, after_s: float) -> None: ...


@dataclass(slots=True, eq=False)
class _Direction:
    """One half of a connection."""

    busy_until: float = 0.0
    last_arrival: float = 0.0


@dataclass(slots=True, eq=False)
class Connection:
    client: Endpoint
    peer: str
    """The client's name for the other side."""
    address: str
    key: str = ""
    """The public key that the listener must have."""
    identity: str = ""
    """The client's name, as learned by the listener in the handshake."""
    id: bytes = b""
    """The listener's id for the client."""
    listener: Endpoint | None = None
    """The process that issued the id."""
    broken: int = 0
    """How often it broke: messages in flight at that time are lost."""
    swallows: set[bool] = field(default_factory=set)
    """Directions (True: up) that lose everything until the connection breaks: half-open."""
    up: _Direction = field(default_factory=_Direction)
    down: _Direction = field(default_factory=_Direction)


class SimNetwork:
    """`note` takes the lines of the trace."""

    def __init__(
        self,
        timeline: Timeline,
        options: NetworkOptions,
        rng: np.random.Generator,
        note: Callable[[str], None],
    ) -> None:
        self.timeline = timeline
        self.options = options
        self.rng = rng
        self._cutter = rng.spawn(1)[0]
        """Random generator that splits messages into parts."""
        self.healed = False
        """Nothing is lost, duplicated or reordered any more; latency and bandwidth stay."""
        self.messages: Counter[str] = Counter()
        """Sent, by type; likewise the bytes, lost and duplicated messages."""
        self.nbytes: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()
        self._note = note
        self._listeners: dict[str, Endpoint] = {}
        self._outgoing: dict[tuple[int, str], Connection] = {}
        self._incoming: dict[bytes, Connection] = {}
        self.away: set[str] = set()
        """Agents of hosts that are partitioned from all others, both ways."""
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._ids = 0
        rate = options.card_bytes_per_s
        self.fabric: Fabric | CardQueues | None = None
        if rate is not None and not options.cards_are_fair:
            self.fabric = CardQueues(timeline, rate)
        elif rate is not None:
            is_duplex = options.cards_are_duplex
            self.fabric = Fabric(timeline, rate, options.cards, is_duplex=is_duplex)

    # ------------------------------------------------------------ connections

    def listen(self, address: str, endpoint: Endpoint) -> None:
        """Clients of the previous listener at this address reconnect."""
        self._listeners[address] = endpoint
        for connection in self._outgoing.values():
            if connection.address == address:
                self._notify(connection)

    def _notify(self, connection: Connection) -> None:
        """Notify the client of an established connection that it will be replaced."""
        if self.options.tells_of_breaks and connection.listener is not None:
            connection.client.reconnected(connection.peer, RECONNECT_S)

    def connect(self, client: Endpoint, peer: str, address: str, key: str = "") -> None:
        """From now on messages of `client` to `peer` go to `address`, whose listener must have this
        public key.
        """
        self._outgoing[id(client), peer] = Connection(client, peer, address, key)

    def forget(self, endpoint: Endpoint) -> None:
        """A process has exited: it stops listening, and its connections are closed."""
        for address in [a for a, e in self._listeners.items() if e is endpoint]:
            del self._listeners[address]
        for key, connection in list(self._outgoing.items()):
            if connection.client is endpoint:
                self._incoming.pop(connection.id, None)
                del self._outgoing[key]

    def client(self, id_: bytes) -> Endpoint | None:
        """The process at the other end of an incoming connection."""
        connection = self._incoming.get(id_)
        return connection.client if connection else None

    def reset(self, client: str) -> None:
        """Break all connections that a daemon has opened; its peers then know it by new ids."""
        for connection in self._outgoing.values():
            if connection.client.name == client:
                self._incoming.pop(connection.id, None)
                connection.broken += 1
                self._notify(connection)
                connection.listener = None
                connection.swallows.clear()
                connection.up.last_arrival = self.timeline.now + RECONNECT_S

    # ------------------------------------------------------------ faults

    def cut(self, source: str, target: str) -> None:
        """Lose everything from `source` to `target`, one way, until as many `heal` calls."""
        self._cuts[source, target] += 1

    def heal(self, source: str, target: str) -> None:
        self._cuts[source, target] -= 1

    def half_open(self, client: str, peer: str, *, upward: bool) -> None:
        """Lose everything in one direction of a connection, until `reset` breaks it."""
        for (_, name), connection in self._outgoing.items():
            if connection.client.name == client and name == peer:
                connection.swallows.add(upward)

    # ------------------------------------------------------------ messages

    def send(self, source: Endpoint, peer: Peer, message: Message) -> None:
        """Send without confirmation, as `daemons.transport.sockets` does."""
        sent = self._packed(message)
        if isinstance(peer, bytes):
            connection = self._incoming.get(peer)
            if connection is None or connection.listener is not source:
                self._lose(source.name, "nobody", message, "no connection")
                return
            self._transmit(connection, False, source.name, connection.client.name, sent)
            return
        connection = self._outgoing.get((id(source), peer))
        if connection is None:
            self._lose(source.name, peer, message, "no connection")
            return
        self._transmit(connection, True, source.name, peer, sent)

    def _packed(self, message: Message) -> _Sent:
        if self.options.payload_scale is not None:
            nbytes = HEADER_BYTES + payload_bytes(message, self.options.payload_scale)
            return _Sent(message, nbytes, None)
        frames = codec.encode(message)
        if message.borrows:
            frames = [bytes(frame) for frame in frames]
        return _Sent(message, sum(len(frame) for frame in frames), frames)

    def _transmit(
        self,
        connection: Connection,
        upward: bool,
        source: str,
        target: str,
        sent: _Sent,
    ) -> None:
        message, nbytes, kind = sent.message, sent.nbytes, type(sent.message).__name__
        self.messages[kind] += 1
        self.nbytes[kind] += nbytes
        link = self.options.links.get((source, target), self.options.link)
        swallowed = self._is_swallowed(connection, upward, source, target)
        if swallowed or self._happens(link.loss):
            self._lose(source, target, message, "lost")
            return
        self._note(f"{source} > {target} {kind} {nbytes}")
        way = connection.up if upward else connection.down
        broken = connection.broken

        def arrive(read: Callable[[], Message]) -> None:
            if connection.broken == broken:
                self._arrive(connection, upward, source, target, message, read)
            else:
                self._lose(source, target, message, "broken")

        if self.fabric is not None:
            self._over_cards(link, way, (source, target), nbytes, partial(arrive, sent.read))
            return
        for arrival in self._arrivals(link, way, kind, nbytes):
            read: Callable[[], Message] = sent.read
            may_be_cut = upward and isinstance(message, Push)
            if may_be_cut and sent.frames and self._cutter.random() < IN_PARTS:
                read = self._come_in_parts(connection, sent.frames, arrival)
            self.timeline.at(arrival, partial(arrive, read))

    def _over_cards(
        self,
        link: SimLink,
        way: _Direction,
        ends: tuple[str, str],
        nbytes: int,
        arrive: Callable[[], None],
    ) -> None:
        """Send over the cards of two machines; within one, only the latency counts."""
        assert self.fabric is not None
        source, target = (self.options.machines.get(name, name) for name in ends)

        def sent() -> None:
            self.timeline.after(link.latency_s, arrive)

        if source == target:
            sent()
        else:
            self.fabric.send(way, source, target, nbytes, sent)

    def _come_in_parts(
        self, connection: Connection, frames: codec.Frames, arrival: float
    ) -> Callable[[], Message]:
        """Deliver parts of a message before the rest, over an established connection. Returns a
        function that reads the whole message after its arrival.
        """
        broken, listener = connection.broken, connection.listener
        arriving = PushInParts(frames)

        def come(share: float) -> None:
            if listener is not None and listener.alive and connection.broken == broken:
                message, come = arriving.come(share)
                listener.deliver_part(Coming(connection.id, message, come, connection.identity))

        now = self.timeline.now
        for share in sorted(self._cutter.random(int(self._cutter.integers(1, PARTS_MAX + 1)))):
            self.timeline.at(now + (arrival - now) * share, partial(come, share))
        return lambda: arriving.come(1.0)[0]

    def _arrivals(self, link: SimLink, way: _Direction, kind: str, nbytes: int) -> list[float]:
        """When the message arrives; twice if it is duplicated."""
        start = max(self.timeline.now, way.busy_until)
        way.busy_until = start + (nbytes / link.bytes_per_s if link.bytes_per_s else 0.0)
        arrival = way.busy_until + link.latency_s
        if link.jitter_s:
            arrival += link.jitter_s * self.rng.random()
        if self._happens(link.reorder):
            arrival += link.late_s * self.rng.random()
        else:
            way.last_arrival = arrival = max(arrival, way.last_arrival)
        if not self._happens(link.duplicate):
            return [arrival]
        self.repeated[kind] += 1
        return [arrival, arrival + link.late_s * self.rng.random()]

    def _is_swallowed(self, connection: Connection, upward: bool, source: str, target: str) -> bool:
        if upward in connection.swallows or self._cuts[source, target] > 0:
            return True
        listener = self._listeners.get(connection.address)
        if not self.away or listener is None:
            return False
        hosts = {connection.client.agent, listener.agent}
        return len(hosts) > 1 and not self.away.isdisjoint(hosts)

    def _happens(self, probability: float) -> bool:
        return bool(probability) and not self.healed and self.rng.random() < probability

    def _arrive(
        self,
        connection: Connection,
        upward: bool,
        source: str,
        target: str,
        message: Message,
        read: Callable[[], Message],
    ) -> None:
        receiver = self._listeners.get(connection.address) if upward else connection.client
        swallowed = self._is_swallowed(connection, upward, source, target)
        if receiver is None or not receiver.alive or swallowed:
            self._lose(source, target, message, "lost")
            return
        if upward and not self._shakes_hands(connection, receiver):
            self._lose(source, target, message, "not let in")
            return
        peer: Peer = connection.id if upward else connection.peer
        identity = connection.identity if upward else ""
        receiver.deliver(peer, read(), identity)

    def _shakes_hands(self, connection: Connection, listener: Endpoint) -> bool:
        """Whether the connection is established. Only a new one is checked: as with CURVE, an
        admitted connection stays when its key is not admitted any more.
        """
        if connection.listener is listener:
            return True
        if listener.secret:
            name = listener.admitted.get(public_of(connection.client.secret))
            if name is None or connection.key != public_of(listener.secret):
                return False
            connection.identity = name
        self._give_id(connection, listener)
        return True

    def _give_id(self, connection: Connection, listener: Endpoint) -> None:
        """Issue the listener's id for a connection: a new one for every process that listens."""
        self._incoming.pop(connection.id, None)
        self._ids += 1
        connection.id = b"\x00" + self._ids.to_bytes(4, "big")
        connection.listener = listener
        self._incoming[connection.id] = connection

    def _lose(self, source: str, target: str, message: Message, why: str) -> None:
        self.lost[type(message).__name__] += 1
        self._note(f"{source} > {target} {type(message).__name__} {why}")


def _copied(frames: codec.Frames) -> Message:
    return codec.decode([bytes(frame) for frame in frames])
