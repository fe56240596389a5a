"""ZeroMQ sockets: one ROUTER for incoming connections, one DEALER for each peer that this daemon
connects to.

Over TCP every connection is encrypted with the keys of its two ends (CURVE), and only known keys
are admitted; unix sockets lie in a directory that only this user can enter.

`ZMQ_ROUTING_ID` stays unset: with a fixed id, libzmq silently ignores a reconnect after a half-open
connection. A message that cannot be queued is dropped; an invalid message is dropped and logged.
The roles retry what matters.
"""

from __future__ import annotations

import errno
import logging
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

import zmq

from daemons.transport import connections
from daemons.transport.backpressure import Backpressure
from daemons.transport.connection_limit import ConnectionLimit
from daemons.transport.large_messages import LargeMessages
from daemons.transport.reconnect import Handshakes, ReconnectingSocket
from daemons.transport.zap import DOMAIN, Gatekeeper
from dlctl.errors import DlctlError, LocalProtocolError, RemoteProtocolError
from dlctl.wire import codec
from dlctl.wire.machine import Coming, Peer, Received, Reconnected
from dlctl.wire.messages import Message

LINGER_MS = 500
"""Time to send the last messages of a daemon that exits."""
HANDSHAKE_MS = 3000
CONNECT_MS = 2000
"""After this, a new attempt starts: the kernel's own retries back off exponentially."""
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 6000
"""Without a whole frame from a peer: on a slow link a segment may take nearly as long."""
QUEUED_MAX = 4096
"""Send queue of a DEALER, in messages: room for several large ones, in segments. The push window
limits their bytes.
"""
ZERO_COPY_BYTES = 64 * 1024
"""Below this a copy is cheaper than the bookkeeping of sharing."""
FRAMES_KEPT = codec.FRAMES_MAX + 4
"""Frames read of one message: the peer, two of a large message, and one to detect an excess."""
RECEIVE_BATCH = 64
"""Messages taken from one socket before the machine's deadlines are checked again."""
NOT_FREE = "choose another port in [network], or 0 for any free one"
NOT_OURS = (
    "no interface of this machine has this address: correct data and bind of this host in "
    "[[hosts]], and address in [network]; ip -brief address shows those that it has"
)

# Plain integers: combining zmq's enums is slower than the calls that use them.
_READABLE = int(zmq.POLLIN)
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

log = logging.getLogger(__name__)


class Transport:
    def __init__(self, poller: zmq.Poller, secret: str = "") -> None:
        """`secret`: this daemon's key; "": no encryption."""
        self.poller = poller
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
        self._secret = secret.encode()
        self._public = zmq.curve_public(self._secret) if secret else b""
        self.gatekeeper: Gatekeeper | None = None
        self.handshakes = Handshakes(poller)
        self.unread = Backpressure()
        self.bulk = LargeMessages()
        self._local: set[zmq.Socket[bytes]] = set()
        """Sockets that only reach processes of this machine and this user."""
        self._bytes_max = codec.FRAME_BYTES_MAX
        """The largest segmented or lent message that the ROUTER receives."""
        self.early: type[Message] | None = None
        """Large messages of this kind are also received while they are still arriving."""
        self.crowd: ConnectionLimit | None = None
        self._accepts = True
        """Whether what peers send to the ROUTER is read."""
        self._muted: dict[str, float] = {}
        """Name -> time until which its messages are discarded."""

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """Make a socket; no other place does."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, codec.FRAME_BYTES_MAX)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.SNDHWM, QUEUED_MAX)
        if self._secret:
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        if address.startswith("ipc:"):
            self._local.add(socket)
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def listen(self, address: str, frame_bytes_max: int = codec.FRAME_BYTES_MAX) -> str:
        """Accept connections at `address`; returns it with the chosen port. A peer that sends a
        larger frame is disconnected.

        Raises DlctlError naming the address and, if known, the process that holds it.
        """
        socket = self._socket(zmq.ROUTER, address)
        socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max)
        self._bytes_max = frame_bytes_max
        if self._secret:
            self.gatekeeper = self.gatekeeper or Gatekeeper(self._context)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        crowd = ConnectionLimit(socket, self.poller) if address.startswith("tcp:") else None
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if crowd is not None:
                crowd.close()
            self._forget(socket)
            raise _cannot_listen(address, error) from error
        self._router, self.crowd = socket, crowd
        if crowd is not None:
            crowd.begin()
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def accept(self, accepts: bool) -> None:
        """Read what peers send to the address that this process listens at, or leave it queued:
        also what follows in a `receive` that has begun.
        """
        if accepts is self._accepts or self._router is None:
            return
        self._accepts = accepts
        if accepts:
            self.poller.register(self._router, zmq.POLLIN)
        else:
            self.poller.unregister(self._router)

    def mute(self, name: str, for_s: float) -> None:
        """Discard all messages with this name's key for `for_s` seconds, without decoding them."""
        self._muted[name] = time.monotonic() + for_s

    def admit(self, names: Mapping[str, str]) -> None:
        """Set who may connect from now on: public key -> name."""
        if self.gatekeeper is not None:
            self.gatekeeper.admit(names)

    def check(self) -> None:
        """A chore: reconnect where libzmq does not. Raises RuntimeError if no connection can be
        admitted any more.
        """
        if self.gatekeeper is not None and not self.gatekeeper.thread.is_alive():
            raise RuntimeError("the thread that authenticates connections (ZAP) has ended")
        self.unread.check()
        self.bulk.check()
        if self.crowd is not None:
            self.crowd.check()
        for link in self.handshakes.ended():
            self.connect(link.peer, link.address, link.key, time.monotonic())

    def connect(self, peer: str, address: str, key: str = "", lost_at: float | None = None) -> None:
        """Connect to `peer` at `address`, whose listener must have this public key; it replaces an
        earlier connection. lost_at: when messages queued for the same peer were lost, to be
        reported (`Reconnected`).

        Raises LocalProtocolError if only one end has a key.
        """
        if bool(key) != bool(self._secret):
            raise LocalProtocolError(f"cannot connect to {peer}: only one end has a key")
        old = self._dealers.pop(peer, None)
        if old is not None:
            self._forget(old)
        socket = self._socket(zmq.DEALER, address)
        if key:
            socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
        if address.startswith("tcp:"):
            self.handshakes.watch(ReconnectingSocket(socket, peer, address, key, lost_at))
        socket.connect(address)
        self._dealers[peer] = socket
        self._names[socket] = peer

    def send(self, peer: Peer, message: Message) -> None:
        """Queue a message; drop it if the peer is unknown, its backlog or the message too large, or
        the queue full.
        """
        try:
            frames = codec.encode(message)
        except LocalProtocolError as error:
            # The roles tolerate a lost message, but not a lost daemon.
            log.error("dropped a message for %s: %s", peer, error.message)
            return
        if isinstance(peer, bytes):
            socket, nbytes = self._router, self.unread.counts(peer, frames)
            if nbytes and not self.unread.has_space(peer, nbytes):
                log.debug("dropped %s: its receiver does not read", type(message).__name__)
                return
        else:
            socket, nbytes = self._dealers.get(peer), 0
        if socket is None:
            return
        parts, loan = self.bulk.outgoing(peer, frames, socket in self._local)
        *others, last = parts  # They leave in this order.
        to, track = connections.address(peer), nbytes > 0 and loan is None
        try:
            for part in others:
                _send_frames(socket, [*to, *part], message.borrows)
            sent = _send_frames(socket, [*to, *last], message.borrows, track)
        except zmq.ZMQError as error:  # The receiver discards the parts that were sent.
            log.debug("dropped %s for %r: %s", type(message).__name__, peer, error)
            return
        tracker = loan or sent
        if tracker is not None and isinstance(peer, bytes):
            self.unread.add(peer, tracker, nbytes)

    def receive(self, socket: zmq.Socket[bytes]) -> Iterator[Received | Coming | Reconnected]:
        """Receive at most `RECEIVE_BATCH` messages that have arrived on one socket."""
        if (reports := self.handshakes.look(socket)) is not None:
            yield from reports
            return
        if self.crowd and self.crowd.look(socket):
            return
        for _ in range(RECEIVE_BATCH):
            if not self._accepts and socket is self._router:
                return
            received = self._receive_frames(socket)
            if received is None:
                return
            frames, identity = received
            if self._muted and time.monotonic() < self._muted.get(identity, 0.0):
                continue
            peer: Peer = self._names.get(socket, "")
            bytes_max = codec.FRAME_BYTES_MAX
            if socket is self._router:
                peer = connections.connection(identity, bytes(frames[0]))
                frames, bytes_max = frames[1:], self._bytes_max
            try:
                whole, answer = self.bulk.incoming(peer, frames, bytes_max, socket in self._local)
                if answer is not None:
                    with suppress(zmq.ZMQError):
                        _send_frames(socket, [*connections.address(peer), *answer], copied=True)
                if whole is not None:
                    yield Received(peer, codec.decode(whole), identity)
                elif (
                    self.early is not None
                    and (part := self.bulk.assembly.coming(peer))
                    and (message := part.of_kind(self.early))
                ):
                    yield Coming(peer, message, tuple(part.come[1:]), identity)
            except RemoteProtocolError as error:
                log.warning(
                    "refused a message%s: %s", identity and f" of {identity}", error.message
                )
            # Checking is cheaper than a receive that raises.
            if not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return

    def _receive_frames(self, socket: zmq.Socket[bytes]) -> tuple[codec.Frames, str] | None:
        """One multipart message and the name of the sender's key, or None. Frames beyond the limit
        are discarded, although libzmq buffers all of them until the last one has arrived.
        """
        frames: codec.Frames = []
        try:
            while True:
                frame = socket.recv(zmq.NOBLOCK, copy=False)
                if len(frames) < FRAMES_KEPT:
                    frames.append(frame.buffer)
                if not frame.more:
                    has_identity = self.gatekeeper is not None and socket is self._router
                    return frames, str(frame.get("User-Id")) if has_identity else ""
        except zmq.Again:
            return None

    def close(self) -> None:
        """Send queued messages (for at most `LINGER_MS`) and close."""
        if self.crowd is not None:
            self.crowd.close()
        for socket in [*self._names, *([self._router] if self._router else [])]:
            self._forget(socket)
        if self.gatekeeper is not None:
            self.gatekeeper.decided.set()
        self._context.term()
        self.bulk.lender.close()

    def _forget(self, socket: zmq.Socket[bytes]) -> None:
        if self._accepts or socket is not self._router:
            self.poller.unregister(socket)
        self.handshakes.forget(socket)
        self._names.pop(socket, None)
        self._local.discard(socket)
        socket.close()


def _send_frames(
    socket: zmq.Socket[bytes], frames: codec.Frames, copied: bool, track: bool = False
) -> zmq.MessageTracker | None:
    """Send one multipart message atomically. Raises ZMQError; then nothing was sent.

    copied: the caller will overwrite the frames. track: return a tracker of when the last frame has
    left this process's memory.
    """
    *others, last = frames
    for frame in others:
        socket.send(frame, _MORE, copied or len(frame) < ZERO_COPY_BYTES)
    is_copied = copied or len(last) < ZERO_COPY_BYTES
    if not track:
        socket.send(last, _LAST, is_copied)
        return None
    own = zmq.Frame(bytes(last) if is_copied else last, track=True, copy=False)
    return socket.send(own, _LAST, copy=False, track=True)


def _cannot_listen(address: str, error: zmq.ZMQError) -> DlctlError:
    """Names the address and, if known, the process that holds it."""
    from daemons.transport.owners import owner_of

    port, holder = address.rpartition(":")[2], ""
    if address.startswith("tcp:") and port.isdigit() and (owner := owner_of(int(port))):
        command = " ".join(shlex.join(owner["command"]).split())
        holder = f" (held by pid {owner['pid']}, {command:.100})"
    return DlctlError(
        f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}{holder}",
        hint=NOT_OURS if error.errno == errno.EADDRNOTAVAIL else NOT_FREE,
    )
