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

import time
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
PATIENCE_S, PAUSE_S = 0.25, 0.001
"""Before something is dropped: ZeroMQ tells of what has left in another thread, which on a busy
machine was seen to get its turn 60 ms late, after hundreds of messages."""
PATIENCE_SHARE = 0.01
"""All others wait meanwhile: so much of the time at most, whether that helps or not."""
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
        self._patience: dict[bytes, tuple[float, float]] = {}
        """Owner -> (seconds that it could be waited for, when that was so); not here: all of it."""

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
        owner = connections.owner(peer)
        if self._fits(owner, nbytes):
            return True
        begun = now = time.monotonic()
        patience_s, fits = self._patience_s(owner, begun), False
        while not fits and now + PAUSE_S <= begun + patience_s:
            time.sleep(PAUSE_S)
            fits, now = self._fits(owner, nbytes), time.monotonic()
        self._patience[owner] = (max(0.0, patience_s - (now - begun)), now)
        self.dropped += not fits
        return fits

    def _patience_s(self, owner: bytes, now: float) -> float:
        left_s, since = self._patience.get(owner, (PATIENCE_S, now))
        return min(PATIENCE_S, left_s + (now - since) * PATIENCE_SHARE)

    def _fits(self, owner: bytes, nbytes: int) -> bool:
        is_large = nbytes >= LARGE_BYTES
        alike = [n for _, n in self._left(owner) if (n >= LARGE_BYTES) == is_large]
        if is_large and len(alike) < MESSAGES_FREE:
            return True
        return sum(alike) + nbytes <= (BYTES_MAX if is_large else SMALL_BYTES_MAX)

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
        now = time.monotonic()
        for owner in list(self._patience):
            if self._patience_s(owner, now) >= PATIENCE_S:
                del self._patience[owner]

    def _left(self, owner: bytes) -> list[tuple[Tracker, int]]:
        left = [one for one in self._waiting.pop(owner, ()) if not one[0].done]
        if left:
            self._waiting[owner] = left
        return left
