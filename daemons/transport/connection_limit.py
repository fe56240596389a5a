"""Limits the open connections of a listener: at the limit, new ones are dropped until some close.

Every connection costs a file descriptor and memory before it is authenticated. libzmq has no limit,
and busy-loops when descriptors run out. Closing the listener would also close established
connections, so it stays open, and a kernel socket filter drops new connection requests. Connections
without a key are closed after the handshake timeout, which frees descriptors; a correct peer
retries every two seconds meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import socket
import struct
import sys
from contextlib import suppress

import zmq

from daemons.transport import socket_events

RESERVED = 256
"""File descriptors for files, the database, children."""
CONNECTIONS_MAX = 4096
DESCRIPTORS_WANTED = 3 * CONNECTIONS_MAX
GUESTS_MIN = 32
"""Connections that are always admitted, however few descriptors are available."""
_COMING = int(zmq.Event.ACCEPTED)
_LISTENING = int(zmq.Event.LISTENING)
ATTACH_FILTER, DETACH_FILTER = 26, 27
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux, which the socket module lacks."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of one instruction: accept 0 bytes of the packet."""

log = logging.getLogger(__name__)
Socket = zmq.Socket[bytes]


def raise_limit() -> int:
    """Raise the limit of file descriptors as far as permitted; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = max(soft, min(DESCRIPTORS_WANTED, hard)), hard
    with suppress(ValueError, OSError):  # As in a container that forbids the call.
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def descriptors() -> int:
    """Number of open ones of this process; `sys.maxsize` if none is left to read /proc with."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return sys.maxsize


class ConnectionLimit:
    """Limits the connections of one TCP listener. Create it before the bind, call `begin` after."""

    def __init__(self, listener: Socket, poller: zmq.Poller) -> None:
        have = raise_limit()
        room = min(CONNECTIONS_MAX, have - min(RESERVED, have // 4))
        self.limit = max(room, descriptors() + GUESTS_MIN)
        """Number of open descriptors at which new connections are dropped."""
        self.is_shut = False
        self._listener = listener
        self._poller = poller
        self._door: socket.socket | None = None
        self._monitor: Socket = socket_events.monitor(listener, _COMING | _LISTENING)
        poller.register(self._monitor, zmq.POLLIN)

    def begin(self) -> None:
        """Start after the listener was bound: its first event has its descriptor."""
        _, descriptor = socket_events.receive(self._monitor)
        self._door = socket.socket(fileno=os.dup(descriptor))

    def look(self, source: Socket) -> bool:
        """Handle new connections; False if this socket is not the monitor."""
        if source is not self._monitor:
            return False
        with suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
        if not self.is_shut and self._door is not None and descriptors() > self.limit:
            self._shut(self._door)
        return True

    def check(self) -> None:
        """A chore: admit connections again when enough descriptors are free."""
        if self.is_shut and self._door and descriptors() <= self.limit - GUESTS_MIN:
            self._door.setsockopt(socket.SOL_SOCKET, DETACH_FILTER, 0)
            self.is_shut = False
            log.warning("file descriptors are free again: accepting new connections")

    def _shut(self, door: socket.socket) -> None:
        code = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        program = struct.pack("HL", 1, ctypes.addressof(code))
        try:
            door.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, program)
        except OSError as error:
            log.warning("cannot drop new connections: %s", error)
            return
        self.is_shut = True
        log.warning("%d file descriptors are open: dropping new connections for now", self.limit)

    def close(self) -> None:
        self._poller.unregister(self._monitor)
        socket_events.stop(self._listener, self._monitor)
        if self._door is not None:
            self._door.close()
