"""The protocol that measures the throughput and round trip of a connection.

token       sent by the connecting end; "+" is the answer
p           "p" is the answer: one round trip
f, bytes    until the connecting end closes its direction. The answer is what has arrived, as two
            numbers (bytes, and nanoseconds from the first to the last), then bytes for as long
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import NamedTuple

TOKEN_BYTES = 64
WELCOME, PING, FLOOD = b"+", b"p", b"f"
PIECE_BYTES = 256 << 10
FLOOD_BYTES_MAX = 96 << 20
"""Enough to measure a fast link, where it takes only a moment."""
SILENT_S = 5.0
COUNTED = struct.Struct("!QQ")
NOTSENT_LOWAT_BYTES = 512 << 10
"""So that the sender measures the sent data, not the data buffered by its kernel."""


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
    """Read so many bytes. Raises ConnectionError if the other end closes before."""
    data = bytearray()
    while len(data) < size_bytes:
        piece = connection.recv(size_bytes - len(data))
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        data += piece
    return bytes(data)


def send_flood(connection: socket.socket, for_s: float) -> None:
    """Send random bytes: a link that compresses would seem faster than it is. Then close this
    direction.
    """
    piece = os.urandom(PIECE_BYTES)
    until, left_bytes = time.monotonic() + for_s, FLOOD_BYTES_MAX
    while left_bytes > 0 and time.monotonic() < until:
        connection.sendall(piece)
        left_bytes -= PIECE_BYTES
    connection.shutdown(socket.SHUT_WR)


def take_flood(connection: socket.socket) -> Arrived:
    """Receive all bytes. The clock starts with the first ones, which are not counted."""
    buffer = bytearray(PIECE_BYTES)
    first_ns, last_ns, size_bytes = 0, 0, 0
    while got := connection.recv_into(buffer):
        last_ns = time.monotonic_ns()
        if first_ns:
            size_bytes += got
        else:
            first_ns = last_ns
    return Arrived(size_bytes, last_ns - first_ns)
