"""How many may stand before a door at once: beyond that it is shut until some have gone.

Whoever connects costs a file descriptor and memory before anybody knows who it is; libzmq has no
limit of its own, and when descriptors run out it turns in a circle. Those who are in are not
touched. Who has no key is put out after the handshake's time, so that the door opens again.
"""

from __future__ import annotations

import logging
import os
import resource
from contextlib import suppress

import zmq

RESERVED = 256
"""File descriptors for files, the database, children."""
CONNECTIONS_MAX = 4096
DESCRIPTORS_WANTED = 3 * CONNECTIONS_MAX
AGAIN = 0.75
"""The door opens when there are less than this part of the limit."""
_COMING = int(zmq.Event.ACCEPTED)

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
    """Open ones of this process."""
    return len(os.listdir("/proc/self/fd"))


class Crowd:
    """Before one TCP listener."""

    def __init__(self, listener: Socket, address: str, poller: zmq.Poller) -> None:
        """`address`: with the port that was chosen."""
        have = raise_limit()
        self.limit = max(1, min(CONNECTIONS_MAX, have - RESERVED, have // 2))
        """Open descriptors from which on nobody is let in."""
        self.is_shut = False
        self._listener = listener
        self._address = address
        self._poller = poller
        self._monitor: Socket = listener.get_monitor_socket(_COMING)
        poller.register(self._monitor, zmq.POLLIN)

    def look(self, source: Socket) -> bool:
        """Somebody has come; False if this socket is not ours."""
        if source is not self._monitor:
            return False
        with suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
        if not self.is_shut and descriptors() > self.limit:
            log.warning("%d file descriptors are open: nobody else is let in for now", self.limit)
            self._listener.unbind(self._address)
            self.is_shut = True
        return True

    def check(self) -> None:
        """A chore: open again when it has become empty enough, and the port is still free."""
        if self.is_shut and descriptors() < AGAIN * self.limit:
            with suppress(zmq.ZMQError):
                self._listener.bind(self._address)
                self.is_shut = False
                log.warning("there is room again: new connections are let in")

    def close(self) -> None:
        self._poller.unregister(self._monitor)
        self._listener.disable_monitor()
        self._monitor.close(linger=0)
