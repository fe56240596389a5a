"""What peers have asked for and not read yet: it lies in our memory until they do.

ZeroMQ limits the messages that wait for a connection, not their bytes, and one message may be a
shard. So they are counted here: for each key, over all the connections that have come with it, and
where there are no keys for each connection. A peer that reads has one or two large messages on
their way, and a few small ones; for one that does not, more are dropped, as for one that is away.
If a connection does not even answer heartbeats, it ends, and what waited there is free.

To follow a message until it has left costs ten times what it costs to send a small one. Messages of
one connection leave in their order: so of small ones only every so many bytes one is followed, and
counts for all that went before it.
"""

from __future__ import annotations

from typing import Protocol

from daemons.transport import connections
from dlctl.wire import Frames

LARGE_BYTES = 128 << 10
"""What counts for so much is large."""
BYTES_MAX, SMALL_BYTES_MAX = 32 << 20, 8 << 20
"""Of large and of small ones: a large one on a slow link shall not keep small ones back."""
MESSAGES_FREE = 2
"""So many large ones may wait for a peer, however large they are."""
STRETCH_BYTES = 32 << 10
"""So much goes over a connection before the next message is followed."""
FRAME_BYTES = 128
"""What ZeroMQ keeps of a frame besides its content."""
CONNECTIONS_MAX = 4096
"""Of which we know how much has gone there since one was followed."""


class Tracker(Protocol):
    """Says when a message has left our memory."""

    @property
    def done(self) -> bool: ...


class Backpressure:
    def __init__(self) -> None:
        self.dropped = 0
        self._waiting: dict[bytes, list[tuple[Tracker, int]]] = {}
        """Owner of connections -> what waits there, in no order: one may be read, another not."""
        self._unfollowed: dict[bytes, int] = {}
        """Connection -> bytes that have gone there since a message was followed. One that is not
        here may have had as much as nobody follows.
        """

    def counts(self, peer: bytes, frames: Frames) -> int:
        """What a message counts for if it is to be followed, with those before it; 0 if it need not
        be, and may be sent.
        """
        nbytes = sum(map(len, frames)) + FRAME_BYTES * len(frames)
        before = self._unfollowed.get(peer)
        if before is None:
            return STRETCH_BYTES + nbytes
        if before + nbytes > STRETCH_BYTES:
            return before + nbytes
        self._unfollowed[peer] = before + nbytes
        return 0

    def has_room(self, peer: bytes, nbytes: int) -> bool:
        """Whether so much more may wait for whoever has the connection `peer`."""
        is_large = nbytes >= LARGE_BYTES
        left = self._left(connections.owner(peer))
        alike = [n for _, n in left if (n >= LARGE_BYTES) == is_large]
        fits = sum(alike) + nbytes <= (BYTES_MAX if is_large else SMALL_BYTES_MAX)
        fits |= is_large and len(alike) < MESSAGES_FREE
        self.dropped += not fits
        return fits

    def add(self, peer: bytes, tracker: Tracker, nbytes: int) -> None:
        """So much is on its way; the tracker says when it has left our memory."""
        if len(self._unfollowed) >= CONNECTIONS_MAX:
            self._unfollowed.clear()
        self._unfollowed[peer] = 0
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
