"""ZeroMQ: one ROUTER that takes whoever comes, one DEALER for each peer that this daemon connects
to.

Over TCP every connection is encrypted with the keys of its two ends (CURVE), and only known keys
get in; unix sockets lie in a directory that only this user can enter.

Connections get no name of their own (`ZMQ_ROUTING_ID` stays unset: with a fixed one, a reconnect
after a half-open connection is silently ignored by libzmq). A message that cannot be queued now is
dropped, and one that is not ours is dropped and counted: the roles repeat what matters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import numpy as np
import zmq

from daemons.transport import connections
from daemons.transport.backpressure import Backpressure, Tracker
from daemons.transport.bind_errors import cannot_listen
from daemons.transport.chunking import SEGMENTS_MAX, Arriving
from daemons.transport.connection_limit import ConnectionLimit
from daemons.transport.large_messages import LargeMessages
from daemons.transport.reconnect import Handshakes, Target
from daemons.transport.zap import DOMAIN, Gatekeeper
from dlctl import wire
from dlctl.errors import LocalProtocolError, RemoteProtocolError
from dlctl.machine import Peer, Reconnected
from dlctl.messages import Message
from dlctl.util.buffer_pool import BufferPool

LINGER_MS = 500
"""For the last messages of a daemon that exits."""
HANDSHAKE_MS = 3000
CONNECT_MS = 2000
"""Then another attempt is begun: the kernel alone would wait ever longer between two of them."""
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 6000
"""Without a whole frame from a peer: on a slow link a segment may take nearly as long."""
QUEUED_MAX = 4096
"""Messages that may wait to be sent to whom we have connected to: several large ones, in segments.
Their bytes are limited by the window of pushes.
"""
ZERO_COPY_BYTES = 64 * 1024
"""Below this a copy is cheaper than the bookkeeping of sharing."""
FRAMES_KEPT = wire.FRAMES_MAX + 4
"""Of one message: a peer, two of a large message, and one too many."""
COPIES_KEPT = SEGMENTS_MAX
"""Pieces of memory for copies: the segments of one message."""
RECEIVE_BATCH = 64
"""Messages taken from one socket before the machine's deadlines are looked at again."""

# Plain integers: combining zmq's enums takes longer than what is done with them.
_READABLE = int(zmq.POLLIN)
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

log = logging.getLogger(__name__)


class Transport:
    def __init__(self, poller: zmq.Poller, secret: str = "") -> None:
        """`secret`: this daemon's key; "": its connections have none."""
        self.poller = poller
        self.refused = 0
        """Messages that were none of ours."""
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
        self._secret = secret.encode()
        self._public = zmq.curve_public(self._secret) if secret else b""
        self.gatekeeper: Gatekeeper | None = None
        self._handshakes = Handshakes(poller)
        self.unread = Backpressure()
        self.bulk = LargeMessages()
        self._copies = BufferPool(COPIES_KEPT)
        """Of what is sent and belongs to somebody who will change it."""
        self._local: set[zmq.Socket[bytes]] = set()
        """Those that reach processes of this machine and this user only."""
        self._bytes_max = wire.FRAME_BYTES_MAX
        """Of one that comes in parts, or is lent, to us as a listener."""
        self.early: Callable[[Peer, str, Arriving], None] | None = None
        """Who wants to know of large messages while they come."""
        self.crowd: ConnectionLimit | None = None
        self._hushed: dict[str, float] = {}
        """Name -> until when nothing is heard of it."""

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """The only place where sockets are made."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.FRAME_BYTES_MAX)
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
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def listen(self, address: str, frame_bytes_max: int = wire.FRAME_BYTES_MAX) -> str:
        """Take connections at `address`; returns it with the port that was chosen. Whoever sends a
        larger frame is disconnected.

        Raises DlctlError naming the address and, if it can be seen, who holds it.
        """
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max)
        self._bytes_max = frame_bytes_max
        socket.setsockopt(zmq.IPV6, int("[" in address))
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
            raise cannot_listen(address, error) from error
        self._router, self.crowd = socket, crowd
        self._note_place(socket, address)
        if crowd is not None:
            crowd.begin()
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def hush(self, name: str, for_s: float) -> None:
        """What comes with this name's key is thrown away for a while, without being looked at."""
        self._hushed[name] = time.monotonic() + for_s

    def admit(self, names: Mapping[str, str]) -> None:
        """From now on only these may connect: public key -> name."""
        if self.gatekeeper is not None:
            self.gatekeeper.admit(names)

    def check(self) -> None:
        """A chore: try again where libzmq does not. Raises RuntimeError if nobody can be let in any
        more.
        """
        if self.gatekeeper is not None and not self.gatekeeper.is_alive():
            raise RuntimeError("the thread that lets connections in has ended")
        self.unread.check()
        self.bulk.check()
        self._copies.check()
        if self.crowd is not None:
            self.crowd.check()
        for target in self._handshakes.take_ended():
            self.connect(*target)
            self._handshakes.replaced(target.peer)

    def take_reconnected(self) -> list[Reconnected]:
        """Whom we have lost and reached again over TCP, since the last call."""
        return self._handshakes.take_reconnected()

    def connect(self, peer: str, address: str, key: str = "") -> None:
        """From now on messages to `peer` go to `address`, to whoever has this public key.

        Raises LocalProtocolError if one end has a key and the other one has none.
        """
        if bool(key) != bool(self._secret):
            raise LocalProtocolError(f"cannot connect to {peer}: only one end has a key")
        old = self._dealers.pop(peer, None)
        if old is not None:
            self._forget(old)
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        if key:
            socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
        if address.startswith("tcp:"):
            self._handshakes.watch(socket, Target(peer, address, key))
        socket.connect(address)
        self._dealers[peer] = socket
        self._names[socket] = peer
        self._note_place(socket, address)

    def _note_place(self, socket: zmq.Socket[bytes], address: str) -> None:
        if address.startswith("ipc:"):
            self._local.add(socket)

    def send(self, peer: Peer, message: Message) -> None:
        """Queue a message, or drop it if there is nobody or no room, or if it is too large."""
        try:
            frames = wire.encode(message)
        except LocalProtocolError as error:
            # Losing one message is what the roles can live with; losing the daemon is not.
            log.error("dropped a message for %s: %s", peer, error.message)
            return
        if isinstance(peer, bytes):
            self._answer(peer, frames, message)
            return
        socket = self._dealers.get(peer)
        if socket is None:
            return
        try:
            self._send(socket, peer, frames, borrowed=message.borrows)
        except zmq.ZMQError as error:
            log.debug("dropped %s for %s: %s", type(message).__name__, peer, error)

    def _answer(self, peer: bytes, frames: wire.Frames, message: Message) -> None:
        """Send to who has connected to us, unless too much is waiting for it already."""
        if self._router is None:
            return
        nbytes = self.unread.counts(peer, frames)
        if nbytes and not self.unread.has_room(peer, nbytes):
            log.debug("dropped %s: its receiver does not read", type(message).__name__)
            return
        try:
            tracker = self._send(
                self._router, peer, frames, borrowed=message.borrows, track=nbytes > 0
            )
        except zmq.ZMQError as error:
            log.debug("dropped %s for %r: %s", type(message).__name__, peer, error)
            return
        if tracker is not None:
            self.unread.add(peer, tracker, nbytes)

    def _send(
        self,
        socket: zmq.Socket[bytes],
        peer: Peer,
        frames: wire.Frames,
        *,
        borrowed: bool,
        track: bool = False,
    ) -> Tracker | None:
        """One message: where it lies if it is large and both ends are here, in segments if it is
        large and goes elsewhere. Raises ZMQError; what is sent then is no whole.

        borrowed: the frames are somebody's who will change them; what leaves is a copy.
        track: returns what says when it has left our memory.
        """
        parts, loan = self.bulk.outgoing(peer, frames, socket in self._local)
        to = connections.address(peer)
        newest: Tracker | None = None
        try:
            for part in parts:
                if borrowed and loan is None:
                    part = [self._copied(frame) for frame in part]
                newest = _send_frames(socket, [*to, *part], track and loan is None) or newest
        except zmq.ZMQError:
            if loan is not None:
                loan.cancel()
            raise
        return loan or newest

    def _copied(self, frame: wire.Frame) -> wire.Frame:
        if len(frame) < ZERO_COPY_BYTES:
            return frame  # ZeroMQ copies it.
        copy = self._copies.take(len(frame))
        copy[:] = np.frombuffer(frame, np.uint8)
        return copy.data

    def receive(self, socket: zmq.Socket[bytes]) -> Iterator[tuple[Peer, Message, str]]:
        """What has come on one socket, at most `RECEIVE_BATCH` messages: from whom, the message,
        and the name that belongs to the sender's key.
        """
        if self._handshakes.look(socket) or (self.crowd and self.crowd.look(socket)):
            return
        for _ in range(RECEIVE_BATCH):
            received = self._receive_frames(socket)
            if received is None:
                return
            frames, identity = received
            if self._hushed and self._is_hushed(identity):
                continue
            peer: Peer = self._names.get(socket, "")
            bytes_max = wire.FRAME_BYTES_MAX
            if socket is self._router:
                peer = connections.connection(identity, bytes(frames[0]))
                frames, bytes_max = frames[1:], self._bytes_max
            try:
                whole = self._whole(socket, peer, frames, bytes_max)
                if whole is not None:
                    yield peer, wire.decode(whole), identity
                elif self.early is not None and (part := self.bulk.coming(peer)):
                    self.early(peer, identity, part)
            except RemoteProtocolError as error:
                self.refused += 1
                log.warning(
                    "refused a message%s: %s", identity and f" of {identity}", error.message
                )
            # Asking is cheaper than an attempt that fails with an exception.
            if not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return

    def _whole(
        self, socket: zmq.Socket[bytes], peer: Peer, frames: wire.Frames, bytes_max: int
    ) -> wire.Frames | None:
        """The frames of a message; None if more of it has to come, or some of it is lost.

        Raises RemoteProtocolError.
        """
        is_local = socket in self._local
        whole, answer = self.bulk.incoming(peer, frames, bytes_max, is_local)
        if answer is not None:
            with suppress(zmq.ZMQError):
                _send_frames(socket, [*connections.address(peer), *answer])
        return whole

    def _is_hushed(self, identity: str) -> bool:
        until = self._hushed.get(identity)
        if until is not None and time.monotonic() >= until:
            del self._hushed[identity]
            return False
        return until is not None

    def _receive_frames(self, socket: zmq.Socket[bytes]) -> tuple[wire.Frames, str] | None:
        """One multipart message and whose key it came with, or None. Frames beyond the limit are
        thrown away; until the last one has come, libzmq has kept them all.
        """
        frames: wire.Frames = []
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

    def give_back(self) -> None:
        """Tell processes of this machine which of their memory is of no use here any more."""
        self.bulk.give_back()

    def close(self) -> None:
        """Send what is queued (for half a second at most) and close."""
        if self.crowd is not None:
            self.crowd.close()
        for socket in [*self._names, *([self._router] if self._router else [])]:
            self._forget(socket)
        if self.gatekeeper is not None:
            self.gatekeeper.close()
        self._context.term()
        self.bulk.close()

    def _forget(self, socket: zmq.Socket[bytes]) -> None:
        self.poller.unregister(socket)
        self._handshakes.forget(socket)
        self._names.pop(socket, None)
        self._local.discard(socket)
        socket.close()


def _send_frames(
    socket: zmq.Socket[bytes], frames: wire.Frames, track: bool = False
) -> zmq.MessageTracker | None:
    """One multipart message. Raises ZMQError for all of it or for nothing.

    track: returns what says when its last frame has left our memory.
    """
    tracker: zmq.MessageTracker | None = None
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        flags, is_tracked = _LAST if i == last else _MORE, track and i == last
        if len(frame) >= ZERO_COPY_BYTES:
            tracker = socket.send(frame, flags, copy=False, track=is_tracked)
        elif is_tracked:  # What is small may be somebody's who will change it.
            own = zmq.Frame(bytes(frame), track=True, copy=False)
            tracker = socket.send(own, flags, copy=False, track=True)
        else:
            socket.send(frame, flags)
    return tracker if track else None
