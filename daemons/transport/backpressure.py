"""Limits the bytes queued for peers that do not read: they occupy this process's memory.

ZeroMQ limits the messages queued for a connection, not their bytes, and one message may be a shard.
So the bytes are counted here: per key, over all connections with that key, or per connection if
connections have no keys. A peer that reads has one or two large messages and a few small ones in
flight. For a peer that does not read, further messages are dropped, as for one that is offline. A
connection that does not answer heartbeats is closed, which frees its queue.

Tracking a message until it has left costs ten times as much as sending a small one. Messages of one
connection leave in order: so a small one is tracked only every `STRETCH_BYTES`, and accounts for
all before it.
"""

from __future__ import annotations

import zmq

from daemons.transport import connections
from daemons.transport.connection_limit import CONNECTIONS_MAX
from daemons.transport.shm import Loan
from dlctl.wire.codec import Frames

LARGE_BYTES = 128 << 10
"""Messages of at least this size are large."""
BYTES_MAX, SMALL_BYTES_MAX = 32 << 20, 8 << 20
"""Limits of large and of small ones: a large one on a slow link must not block small ones."""
MESSAGES_FREE = 2
"""Large messages that may always be queued for a peer, whatever their size."""
STRETCH_BYTES = 32 << 10
"""Bytes sent over a connection between two tracked messages."""
FRAME_BYTES = 128
"""ZeroMQ's overhead per frame."""
Tracker = zmq.MessageTracker | Loan
"""Tracks when a message has left this process's memory."""


class Backpressure:
    def __init__(self) -> None:
        self._waiting: dict[bytes, list[tuple[Tracker, int]]] = {}
        """Owner of connections -> queued messages, in no order."""
        self._untracked: dict[bytes, int] = {}
        """Connection -> bytes sent since the last tracked message. For a missing one, assume
        `STRETCH_BYTES`.
        """

    def counts(self, peer: bytes, frames: Frames) -> int:
        """The bytes that a message accounts for if it must be tracked, including those before it; 0
        if it may be sent untracked.
        """
        nbytes = sum(map(len, frames)) + FRAME_BYTES * len(frames)
        before = self._untracked.get(peer, STRETCH_BYTES)
        if before + nbytes > STRETCH_BYTES:
            return before + nbytes
        self._untracked[peer] = before + nbytes
        return 0

    def has_space(self, peer: bytes, nbytes: int) -> bool:
        """Whether `nbytes` more may be queued for the owner of the connection `peer`."""
        is_large = nbytes >= LARGE_BYTES
        left = self._left(connections.owner(peer))
        alike = [n for _, n in left if (n >= LARGE_BYTES) == is_large]
        if is_large and len(alike) < MESSAGES_FREE:
            return True
        return sum(alike) + nbytes <= (BYTES_MAX if is_large else SMALL_BYTES_MAX)

    def add(self, peer: bytes, tracker: Tracker, nbytes: int) -> None:
        """Count queued bytes until `tracker` reports that they have left this process's memory."""
        self._untracked[peer] = 0
        self._waiting.setdefault(connections.owner(peer), []).append((tracker, nbytes))

    def check(self) -> None:
        """A chore: forget peers that have read everything or disconnected, and connections if there
        are too many. Not each time: what is assumed of a missing one would soon fill a slow peer's
        limit.
        """
        if len(self._untracked) > CONNECTIONS_MAX:
            self._untracked.clear()
        for owner in list(self._waiting):
            self._left(owner)

    def _left(self, owner: bytes) -> list[tuple[Tracker, int]]:
        left = [one for one in self._waiting.pop(owner, ()) if not one[0].done]
        if left:
            self._waiting[owner] = left
        return left
