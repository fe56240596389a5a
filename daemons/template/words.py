"""What an agent, its template and the daemons that it forks tell each other.

    agent -> template     a `StartRequest`, with two descriptors: the daemon's log, and its line
    template -> agent     `READY` once it can fork, or why it cannot
    daemon -> agent       on its line: its pid, once it is a daemon like any other
    agent -> daemon       on its line: its credentials. If the line breaks off before that, as the
                          agent has given up, the daemon exits

The template forks a process that forks the daemon and exits. So the daemon is a child of the
nearest subreaper above, which is the agent: it gets the exit status of the daemon, whatever
becomes of the template.
"""

from __future__ import annotations

import json
import socket
from typing import NamedTuple

MESSAGE_BYTES_MAX = 1 << 17
READY = b"ready"
PER_DAEMON = ("DLCTL_NAME", "DLCTL_INCARNATION", "RANK")
"""Variables that the template lacks: they differ between daemons, and no library reads them when it
is imported."""
ROOM_BYTES = 512
"""The template has an argument of this length, so that command lines of daemons fit into the
memory of its own."""


class StartRequest(NamedTuple):
    """A daemon that is to be forked."""

    argv: list[str]
    """The command line that would start it."""
    environment: dict[str, str]
    """`PER_DAEMON`, as far as the daemon has them."""
    agent: int
    """The pid of its parent."""
    spares: int
    """How many processes it forks for other ranks of its replica."""

    def to_bytes(self) -> bytes:
        return json.dumps(self).encode()


def read_request(data: bytes) -> StartRequest:
    return StartRequest(*json.loads(data))


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
