"""ZeroMQ: one ROUTER that takes whoever comes, one DEALER for each peer that this daemon connects
to.

Connections get no name of their own (`ZMQ_ROUTING_ID` stays unset: with a fixed one, a reconnect
after a half-open connection is silently ignored by libzmq). Who a peer is stands in its messages. A
message that cannot be queued now is dropped, and one that is not ours is dropped and counted: the
roles repeat what matters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import zmq

from dlctl import runs, wire
from dlctl.errors import DlctlError, LocalProtocolError, RemoteProtocolError
from dlctl.machine import Peer
from dlctl.messages import Message

LINGER_MS = 500
"""For the last messages of a daemon that exits."""
HANDSHAKE_MS = 3000
CONNECT_MS = 2000
"""Then another attempt is begun: the kernel alone would wait ever longer between two of them."""
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
ZERO_COPY_BYTES = 64 * 1024
"""Below this a copy is cheaper than the bookkeeping of sharing."""
RECEIVE_BATCH = 64
"""Messages taken from one socket before the machine's deadlines are looked at again."""

# Plain integers: combining zmq's enums takes longer than what is done with them.
_READABLE = int(zmq.POLLIN)
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

log = logging.getLogger(__name__)


class Transport:
    def __init__(self, poller: zmq.Poller) -> None:
        self.poller = poller
        self.refused = 0
        """Messages that were none of ours."""
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}

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
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def listen(self, address: str) -> str:
        """Take connections at `address`; returns it with the port that was chosen.

        Raises DlctlError naming the address and, if it can be seen, who holds it.
        """
        socket = self._socket(zmq.ROUTER)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise DlctlError(
                f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}{_holder(address)}",
                hint="choose another port in [network], or 0 for any free one",
            ) from error
        self._router = socket
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def connect(self, peer: str, address: str) -> None:
        """From now on messages to `peer` go to `address`."""
        old = self._dealers.pop(peer, None)
        if old is not None:
            self._forget(old)
        socket = self._socket(zmq.DEALER)
        socket.connect(address)
        self._dealers[peer] = socket
        self._names[socket] = peer

    def send(self, peer: Peer, message: Message) -> None:
        """Queue a message, or drop it if there is nobody or no room, or if it is too large."""
        try:
            frames = wire.encode(message)
        except LocalProtocolError as error:
            # Losing one message is what the roles can live with; losing the daemon is not.
            log.error("dropped a message for %s: %s", peer, error.message)
            return
        if isinstance(peer, bytes):
            socket, frames = self._router, [peer, *frames]
        else:
            socket = self._dealers.get(peer)
        if socket is None:
            return
        try:
            _send_frames(socket, frames)
        except zmq.ZMQError as error:
            log.debug("dropped %s for %s: %s", type(message).__name__, peer, error)

    def receive(self, socket: zmq.Socket[bytes]) -> Iterator[tuple[Peer, Message]]:
        """What has come on one socket, at most `RECEIVE_BATCH` messages."""
        for _ in range(RECEIVE_BATCH):
            frames = self._receive_frames(socket)
            if frames is None:
                return
            peer: Peer = self._names.get(socket, "")
            if socket is self._router:
                peer, frames = bytes(frames[0]), frames[1:]
            try:
                yield peer, wire.decode(frames)
            except RemoteProtocolError as error:
                self.refused += 1
                log.warning("refused a message: %s", error.message)
            # Asking is cheaper than an attempt that fails with an exception.
            if not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return

    def _receive_frames(self, socket: zmq.Socket[bytes]) -> wire.Frames | None:
        """One multipart message, or None. Frames beyond the limit are read and thrown away."""
        frames: wire.Frames = []
        try:
            while True:
                frame = socket.recv(zmq.NOBLOCK, copy=False)
                if len(frames) <= wire.FRAMES_MAX + 1:
                    frames.append(frame.buffer)
                if not frame.more:
                    return frames
        except zmq.Again:
            return None

    def close(self) -> None:
        """Send what is queued (for half a second at most) and close."""
        for socket in [*self._names, *([self._router] if self._router else [])]:
            self._forget(socket)
        self._context.term()

    def _forget(self, socket: zmq.Socket[bytes]) -> None:
        self.poller.unregister(socket)
        self._names.pop(socket, None)
        socket.close()


def address_for(run_id: str, name: str, transport: str, port: int) -> str:
    """Where daemon `name` listens: a unix socket, or a port on the loopback interface (0: any)."""
    if transport == "ipc":
        return runs.socket_address(run_id, name)
    return f"tcp://127.0.0.1:{port or '*'}"


def _send_frames(socket: zmq.Socket[bytes], frames: wire.Frames) -> None:
    """One multipart message. Raises ZMQError for all of it or for nothing."""
    for frame in frames[:-1]:
        socket.send(frame, _MORE, copy=len(frame) < ZERO_COPY_BYTES)
    socket.send(frames[-1], _LAST, copy=len(frames[-1]) < ZERO_COPY_BYTES)


def _holder(address: str) -> str:
    """ " (held by pid 123, nginx)" for a TCP port, if we may know."""
    import psutil

    port = address.rpartition(":")[2]
    if not address.startswith("tcp:") or not port.isdigit():
        return ""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == int(port):
                name = psutil.Process(connection.pid).name() if connection.pid else "unknown"
                return f" (held by pid {connection.pid}, {name})"
    except (psutil.Error, OSError):
        return ""
    return ""
