"""How many may stand before a door at once: beyond that it is shut until some have gone.

Whoever connects costs a file descriptor and memory before anybody knows who it is; libzmq has no
limit of its own, and when descriptors run out it turns in a circle. Those who are in are not
touched: closing the listener would end their connections, too, so it stays open, and a filter in
the kernel drops what asks for a new one. Who has no key is put out after the handshake's time, so
that the door opens again; an honest peer that came meanwhile tries again every two seconds.
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
"""So many are let in, however few descriptors there are."""
_COMING = int(zmq.Event.ACCEPTED)
_LISTENING = int(zmq.Event.LISTENING)
LISTEN_MS = 1000
ATTACH_FILTER, DETACH_FILTER = 26, 27
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux, which the socket module does not name."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of one instruction: keep 0 bytes of the packet."""

log = logging.getLogger(__name__)
Socket = zmq.Socket[bytes]


def raise_limit() -> int:
    """Have as many file descriptors as we want, if we may; returns how many we have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(DESCRIPTORS_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return DESCRIPTORS_WANTED if soft == resource.RLIM_INFINITY else soft


def descriptors() -> int:
    """Open ones of this process; more than there can be if not even one is left to look with."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return sys.maxsize


class ConnectionLimit:
    """Before one TCP listener; made before it is bound, and told when it is."""

    def __init__(self, listener: Socket, poller: zmq.Poller) -> None:
        have = raise_limit()
        room = min(CONNECTIONS_MAX, have - min(RESERVED, have // 4))
        self.limit = max(room, descriptors() + GUESTS_MIN)
        """Open descriptors from which on nobody is let in."""
        self.is_shut = False
        self._listener = listener
        self._poller = poller
        self._door: socket.socket | None = None
        self._monitor: Socket = socket_events.monitor(listener, _COMING | _LISTENING)
        poller.register(self._monitor, zmq.POLLIN)

    def begin(self) -> None:
        """It is bound now."""
        if self._monitor.poll(LISTEN_MS):
            _, descriptor = socket_events.receive(self._monitor)
            self._door = socket.socket(fileno=os.dup(descriptor))
        else:
            log.warning("the listener is not known: whoever connects cannot be kept out")

    def look(self, source: Socket) -> bool:
        """Somebody has come; False if this socket is not ours."""
        if source is not self._monitor:
            return False
        with suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
        if not self.is_shut and self._door is not None and descriptors() > self.limit:
            self._shut(self._door)
        return True

    def check(self) -> None:
        """A chore: open again when it has become empty enough."""
        if self.is_shut and self._door and descriptors() <= self.limit - GUESTS_MIN:
            self._door.setsockopt(socket.SOL_SOCKET, DETACH_FILTER, 0)
            self.is_shut = False
            log.warning("there is room again: new connections are let in")

    def _shut(self, door: socket.socket) -> None:
        code = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        program = struct.pack("HL", 1, ctypes.addressof(code))
        try:
            door.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, program)
        except OSError as error:
            log.warning("cannot keep new connections out: %s", error)
            return
        self.is_shut = True
        log.warning("%d file descriptors are open: nobody else is let in for now", self.limit)

    def close(self) -> None:
        self._poller.unregister(self._monitor)
        socket_events.stop(self._listener, self._monitor)
        if self._door is not None:
            self._door.close()
