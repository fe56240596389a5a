"""Something in the middle between who connects and a port of this machine, which changes bytes or
ends connections.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

PIECE_BYTES = 65536
Change = Callable[[int, bool, bytes], bytes | None]
"""(Which connection it is, from 1; whether who connected has sent it; what has come) -> what goes
on; None: the connection ends.
"""


class Proxy:
    def __init__(self, port: int, change: Change) -> None:
        """`port`: where the connections lead to."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connections = 0
        self._port, self._change = port, change
        self._open: list[socket.socket] = [self.listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"

    def _accept(self) -> None:
        with suppress(OSError):  # the test is over
            while True:
                here, _ = self.listener.accept()
                there = socket.create_connection(("127.0.0.1", self._port))
                self.connections += 1
                self._open += [here, there]
                for ends in ((here, there, True), (there, here, False)):
                    words = (self.connections, *ends)
                    threading.Thread(target=self._carry, args=words, daemon=True).start()

    def _carry(
        self, number: int, source: socket.socket, target: socket.socket, is_up: bool
    ) -> None:
        with suppress(OSError):  # one side has gone
            while data := source.recv(PIECE_BYTES):
                changed = self._change(number, is_up, data)
                if changed is None:
                    break
                target.sendall(changed)
        _end(source, target)

    def close(self) -> None:
        _end(*self._open)


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):  # Or the other side would hear of it only when nobody reads it.
            one.shutdown(socket.SHUT_RDWR)
        one.close()


GREETING_BYTES = 64
"""Of ZMTP: what follows is the handshake."""


def cut_in_the_middle(number: int, is_up: bool, data: bytes) -> bytes | None:
    """The first connection ends in its handshake: the server's first word after the greeting is
    lost.
    """
    if number == 1 and not is_up and len(data) >= GREETING_BYTES:
        return None
    return data
