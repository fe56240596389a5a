"""How fast a connection is: the words of both ends, and data that is of no use.

token                          whoever connects says it; "+" is the answer
p                              "p" comes back: one round trip
d  ->  pieces  (a length, then so many bytes; a length of zero is the end)
u  pieces  ->  what has arrived, as two numbers: bytes, and nanoseconds from the first to the last
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import NamedTuple

TOKEN_BYTES = 64
WELCOME, PING, DOWN, UP = b"+", b"p", b"d", b"u"
PIECE_BYTES = 256 << 10
FLOOD_BYTES_MAX = 96 << 20
"""Enough for a fast link, and over in a moment there."""
SILENT_S = 5.0
LENGTH = struct.Struct("!I")
COUNTED = struct.Struct("!QQ")
NOTSENT_LOWAT_BYTES = 512 << 10
"""The sender sees how much has left, not how much its kernel was willing to keep."""


class Arrived(NamedTuple):
    size_bytes: int
    took_ns: int

    @property
    def bytes_per_s(self) -> float | None:
        return self.size_bytes / (self.took_ns / 1e9) if self.took_ns > 0 else None


def prepare(connection: socket.socket) -> None:
    connection.settimeout(SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)


def read_exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Raises ConnectionError if the other end has closed it before."""
    data = bytearray()
    while len(data) < size_bytes:
        piece = connection.recv(size_bytes - len(data))
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        data += piece
    return bytes(data)


def send_flood(connection: socket.socket, for_s: float) -> None:
    """Random bytes: a link that compresses would seem faster than it is."""
    piece = LENGTH.pack(PIECE_BYTES) + os.urandom(PIECE_BYTES)
    until, left_bytes = time.monotonic() + for_s, FLOOD_BYTES_MAX
    while left_bytes > 0 and time.monotonic() < until:
        connection.sendall(piece)
        left_bytes -= PIECE_BYTES
    connection.sendall(LENGTH.pack(0))


def take_flood(connection: socket.socket) -> Arrived:
    """All of it; the clock begins with the first bytes, which are not counted."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    first_ns, last_ns, size_bytes = 0, 0, 0
    while length := LENGTH.unpack(read_exactly(connection, LENGTH.size))[0]:
        if length > PIECE_BYTES:
            raise ConnectionError("the other end does not speak as a probe does")
        while length:
            got = connection.recv_into(buffer[:length])
            if not got:
                raise ConnectionError("the other end has closed the connection")
            length -= got
            last_ns = time.monotonic_ns()
            if first_ns:
                size_bytes += got
            else:
                first_ns = last_ns
    return Arrived(size_bytes, last_ns - first_ns)
