"""Large messages travel in segments: while one is put in its place, the next ones are on their way.

What ZeroMQ receives lies in new memory; for segments it is the same memory again and again. They
are put together in one array, so that a message that comes in segments costs one copy and is
otherwise what it would have been: whole, or not there. Segments of one connection come in order;
where one is missing, the message is dropped, and the roles repeat it.

    the beginning    [head, lengths of the frames that are cut, frames ...]; those are empty here
    a segment        [head, bytes]

So who a message is from and what it is about is known while the bulk of it is still on its way.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from daemons.transport import shm, shm_layout
from dlctl import wire
from dlctl.errors import RemoteProtocolError
from dlctl.messages import Array, Message
from dlctl.util.buffer_pool import BufferPool
from dlctl.wire import FRAMES_MAX, Frame, Frames

SEGMENT_BYTES = 512 << 10
"""libzmq takes a peer for dead of which no whole frame has come for some seconds (`transport.py`):
so long a segment may be on its way over the slowest link that there shall be, 100 kB/s.
"""
SEGMENTS_MAX = 400
"""Of one message; of one of more than 200 MB they are larger. ZeroMQ keeps 1000 messages for a peer
that does not read, and two large ones have to fit in.
"""
FRAME_BYTES_MIN = SEGMENT_BYTES
"""Frames from this on are cut."""
PATIENCE_S = 10.0
"""For the next segment; then the peer is gone, and what there is of its message, too."""
STEP_BYTES = 4 << 20
"""When so much more of a message has come, there is something to be done with it."""
_HEAD = struct.Struct("<4sQQ")
"""Which of the two it is, number of the message, place of this segment."""
_BEGINNING, _SEGMENT = b"\xc1beg", b"\xc1seg"
_FOREIGN = 0xC1
"""No msgpack begins with this byte, so no header of a message does."""


def are_large(frames: Frames) -> bool:
    """Whether a message has to be cut."""
    return shm_layout.are_large(frames, FRAME_BYTES_MIN)


def cut(frames: Frames, number: int) -> Iterator[Frames]:
    """The messages that a large one travels as. `number`: another one for every message."""
    lengths, rest = shm_layout.split(frames, FRAME_BYTES_MIN)
    places, total = shm_layout.places(lengths)
    size = max(SEGMENT_BYTES, -(-total // SEGMENTS_MAX))
    yield [_HEAD.pack(_BEGINNING, number, 0), shm_layout.pack(lengths), *rest]
    for frame, length, place in zip(frames, lengths, places, strict=True):
        for lo in range(0, length, size):
            head = _HEAD.pack(_SEGMENT, number, place + lo)
            yield [head, memoryview(frame)[lo : lo + size]]


@dataclass(slots=True)
class Arriving:
    """A message of which some has come."""

    number: int
    frames: Frames
    """Those that are cut are views of memory that is being filled."""
    come: list[int]
    """Of each frame, how many bytes are there, from the front to the back; others are anything."""
    left: deque[tuple[int, int, Array]]
    """The frames that are still to be filled: (which one, its place, uint8[n])."""
    seen_at: float
    told: int = 0
    """Of so many bytes of these frames it was said that they have come."""
    message: Message | None = None
    """What its reader has made of the frames."""
    is_of_interest: bool = True
    """Whether its reader wants to hear more."""

    def of_kind(self, kind: type[Message]) -> Message | None:
        """The message, if it is one of this kind, whose large fields are arrays: nothing of it is
        copied. What is to be refused is refused when all of it has come.
        """
        if self.message is None and self.is_of_interest:
            with suppress(RemoteProtocolError):
                if wire.kind(self.frames) is kind:
                    self.message = wire.decode(self.frames)
            self.is_of_interest = self.message is not None
        return self.message

    def put(self, place: int, data: Frame) -> bool:
        """The next segment. False if it is another one: one before it is lost."""
        which, start, memory = self.left[0]
        begin = self.come[which]
        end = begin + len(data)
        if place != start + begin or not data or end > memory.size:
            return False
        memory[begin:end] = np.frombuffer(data, np.uint8)
        self.come[which] = end
        if end == memory.size:
            self.left.popleft()
        return True


class Assembly:
    """Puts together what comes over any number of connections, one message of each at a time."""

    def __init__(self) -> None:
        self._arriving: dict[Hashable, Arriving] = {}
        self._memory = BufferPool()
        self._begun_at: dict[Hashable, float] = {}
        """Connection -> when its newest message has begun, if that was not long ago."""
        self._is_kept = False
        """The memory, although nobody uses it: it was soon needed again."""

    def take(self, source: Hashable, frames: Frames, bytes_max: int) -> Frames | None:
        """The frames of a whole message; None as long as more of it has to come, or some is lost.

        `source`: the connection. Raises RemoteProtocolError for segments that `cut` never makes,
        and for a message of more than `bytes_max` bytes.
        """
        head = frames[0]
        if not head or head[0] != _FOREIGN:
            return frames
        if len(head) != _HEAD.size or len(frames) < 2:
            raise RemoteProtocolError("this is no segment of a message")
        kind, number, place = _HEAD.unpack(head)
        if kind == _BEGINNING:
            self._arriving.pop(source, None)  # Its memory may serve this one.
            before, now = self._begun_at.get(source, -math.inf), time.monotonic()
            self._is_kept, self._begun_at[source] = now < before + shm.KEEP_S, now
            self._arriving[source] = self._begun(number, frames[1], frames[2:], bytes_max)
            return None
        if kind != _SEGMENT or len(frames) != 2:
            raise RemoteProtocolError("this is no segment of a message")
        return self._put(source, number, place, frames[1])

    def coming(self, source: Hashable) -> Arriving | None:
        """What comes from there, if `STEP_BYTES` more of it have come than the last time."""
        arriving = self._arriving.get(source)
        if arriving is None:
            return None
        there = sum(arriving.come)
        if there - arriving.told < STEP_BYTES:
            return None
        arriving.told = there
        return arriving

    def trim(self) -> None:
        """Let go what will hardly be needed again soon."""
        if not self._is_kept:
            self._memory.trim()

    def check(self) -> None:
        """A chore: forget what nobody goes on with."""
        now = time.monotonic()
        self._begun_at = {k: at for k, at in self._begun_at.items() if now < at + shm.KEEP_S}
        oldest = now - PATIENCE_S
        for source, arriving in list(self._arriving.items()):
            if arriving.seen_at < oldest:
                del self._arriving[source]
        self._memory.check()

    def _begun(self, number: int, packed: Frame, rest: Frames, bytes_max: int) -> Arriving:
        if len(rest) > FRAMES_MAX:
            raise RemoteProtocolError(f"{len(rest)} frames; at most {FRAMES_MAX}")
        lengths = shm_layout.unpack(packed, len(rest))
        are_both = any(n and len(frame) for n, frame in zip(lengths, rest, strict=True))
        if not any(lengths) or lengths[0] or are_both:  # Cut, and there all the same.
            raise RemoteProtocolError("no message is cut like this")
        places, total = shm_layout.places(lengths)
        nbytes = total + sum(map(len, rest))
        if nbytes > bytes_max:
            raise RemoteProtocolError(f"a message of {nbytes} bytes; at most {bytes_max}")
        memory = self._room(total)
        left = deque(
            (which, place, memory[place : place + length])
            for which, (length, place) in enumerate(zip(lengths, places, strict=True))
            if length
        )
        frames = shm_layout.join(memory.data, lengths, rest)
        return Arriving(number, frames, list(map(len, rest)), left, time.monotonic())

    def _put(self, source: Hashable, number: int, place: int, data: Frame) -> Frames | None:
        arriving = self._arriving.get(source)
        if arriving is None or arriving.number != number:
            return None  # Its beginning is lost.
        if not arriving.put(place, data):
            del self._arriving[source]
            return None
        arriving.seen_at = time.monotonic()
        if arriving.left:
            return None
        del self._arriving[source]
        return arriving.frames

    def _room(self, nbytes: int) -> Array:
        try:
            return self._memory.take(nbytes)
        except MemoryError:
            raise RemoteProtocolError(f"no memory for a message of {nbytes} bytes") from None
