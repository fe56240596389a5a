"""What peers have asked for and not read yet: it lies in our memory until they do.

ZeroMQ limits the messages that wait for a peer, not their bytes, and one message may be a shard. So
what is large is counted here. A peer that reads has one or two of them on their way; for one that
does not, more are dropped, as for one that is away. If it does not even answer heartbeats, its
connection ends, and with that all is free.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

BYTES_MAX = 32 << 20
MESSAGES_FREE = 2
"""So many may wait for a peer, however large they are."""


class Tracker(Protocol):
    """Says when a message has left our memory."""

    @property
    def done(self) -> bool: ...


class Unread:
    def __init__(self) -> None:
        self.dropped = 0
        self._waiting: dict[bytes, deque[tuple[Tracker, int]]] = {}

    def has_room(self, peer: bytes, nbytes: int) -> bool:
        """Whether so much more may wait for `peer`."""
        waiting = self._waiting.get(peer)
        if waiting is None:
            return True
        while waiting and waiting[0][0].done:
            waiting.popleft()
        if len(waiting) < MESSAGES_FREE or sum(n for _, n in waiting) + nbytes <= BYTES_MAX:
            return True
        self.dropped += 1
        return False

    def add(self, peer: bytes, tracker: Tracker, nbytes: int) -> None:
        """So much is on its way; the tracker says when it has left our memory."""
        self._waiting.setdefault(peer, deque()).append((tracker, nbytes))

    def check(self) -> None:
        """A chore: forget who has read everything, or is gone."""
        for peer, waiting in list(self._waiting.items()):
            if all(tracker.done for tracker, _ in waiting):
                del self._waiting[peer]
