"""What peers have asked for and not read yet: it lies in our memory until they do.

ZeroMQ limits the messages that wait for a connection, not their bytes, and one message may be a
shard. So what is large is counted here: for each key, over all the connections that have come with
it, and where there are no keys for each connection. A peer that reads has one or two messages on
their way; for one that does not, more are dropped, as for one that is away. If a connection does
not even answer heartbeats, it ends, and what waited there is free.
"""

from __future__ import annotations

from typing import Protocol

from daemons import connections

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
        self._waiting: dict[bytes, list[tuple[Tracker, int]]] = {}
        """Owner of connections -> what waits there, in no order: one may be read, another not."""

    def has_room(self, peer: bytes, nbytes: int) -> bool:
        """Whether so much more may wait for whoever has the connection `peer`."""
        waiting = self._left(connections.owner(peer))
        if len(waiting) < MESSAGES_FREE or sum(n for _, n in waiting) + nbytes <= BYTES_MAX:
            return True
        self.dropped += 1
        return False

    def add(self, peer: bytes, tracker: Tracker, nbytes: int) -> None:
        """So much is on its way; the tracker says when it has left our memory."""
        self._waiting.setdefault(connections.owner(peer), []).append((tracker, nbytes))

    def check(self) -> None:
        """A chore: forget who has read everything, or is gone."""
        for owner in list(self._waiting):
            self._left(owner)

    def _left(self, owner: bytes) -> list[tuple[Tracker, int]]:
        left = [one for one in self._waiting.pop(owner, ()) if not one[0].done]
        if left:
            self._waiting[owner] = left
        return left
