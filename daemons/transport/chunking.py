"""Large messages travel in segments: while one is copied into place, the next ones are in flight.

ZeroMQ receives every frame into new memory; for segments the allocator reuses it. Segments are
assembled in one array, so a segmented message costs one copy and still arrives whole or not at
all. Segments of one connection arrive in order; if one is missing, the message is dropped, and the
roles retry.

    the beginning    [head, lengths of the segmented frames, frames ...]; those are empty here
    a segment        [head, bytes]

So the sender and the header of a message are known while most of it is still in flight.
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
from dlctl.errors import RemoteProtocolError
from dlctl.util.buffer_pool import BufferPool
from dlctl.wire import codec
from dlctl.wire.codec import Frame, Frames
from dlctl.wire.messages import Array, Message

SEGMENT_BYTES = 512 << 10
"""libzmq declares a peer dead if no whole frame arrives within `HEARTBEAT_TIMEOUT_MS`
(`sockets.py`): a segment must arrive sooner over the slowest supported link, 100 kB/s.
"""
SEGMENTS_MAX = 400
"""Segments of one message; those of a message of more than 200 MB are larger. ZeroMQ queues 1000
messages for a peer that does not read, and two large ones must fit.
"""
FRAME_BYTES_MIN = SEGMENT_BYTES
"""Frames of at least this size are segmented."""
PATIENCE_S = 10.0
"""Timeout of the next segment; then the incomplete message is discarded."""
STEP_BYTES = 4 << 20
"""A partial message is reported each time this many more bytes have arrived."""
_HEAD = struct.Struct("<4sQQ")
"""Kind, number of the message, offset of this segment."""
_BEGINNING, _SEGMENT = b"\xc1beg", b"\xc1seg"
_FOREIGN = 0xC1
"""No msgpack begins with this byte, so no header of a message does."""


def cut(frames: Frames, number: int) -> Iterator[Frames]:
    """The messages that a large one is sent as. `number`: unique for every message."""
    lengths, rest = shm_layout.split(frames, FRAME_BYTES_MIN)
    places, total = shm_layout.places(lengths)
    size = max(SEGMENT_BYTES, -(-total // SEGMENTS_MAX))
    yield [_HEAD.pack(_BEGINNING, number, 0), shm_layout.pack(lengths), *rest]
    for frame, length, place in zip(frames, lengths, places, strict=True):
        for lo in range(0, length, size):
            head = _HEAD.pack(_SEGMENT, number, place + lo)
            yield [head, memoryview(frame)[lo : lo + size]]


@dataclass(slots=True)
class PartialMessage:
    """A partially received message."""

    number: int
    frames: Frames
    """Segmented frames are views of memory that is being filled."""
    come: list[int]
    """Bytes received of each frame, from its start; the rest is undefined."""
    left: deque[tuple[int, int, Array]]
    """The incomplete frames: (index, offset, uint8[n])."""
    seen_at: float
    reported: int = 0
    """Bytes already reported to the reader."""
    message: Message | None = None
    """The decoded message, for its reader."""

    def of_kind(self, kind: type[Message]) -> Message | None:
        """The message, if it is of this kind, whose large fields are arrays: nothing is copied. An
        invalid message is refused when all of it has arrived.
        """
        with suppress(RemoteProtocolError):
            if self.message is None and codec.kind(self.frames) is kind:
                self.message = codec.decode(self.frames)
        return self.message

    def put(self, place: int, data: Frame) -> bool:
        """Store the next segment. False if it is out of order: an earlier one is lost."""
        which, start, memory = self.left[0]
        begin = self.come[which]
        end = begin + len(data)
        self.seen_at = time.monotonic()
        if place != start + begin or not data or end > memory.size:
            return False
        memory[begin:end] = np.frombuffer(data, np.uint8)
        self.come[which] = end
        if end == memory.size:
            self.left.popleft()
        return True


class Assembly:
    """Assembles messages of any number of connections, one message per connection at a time."""

    def __init__(self) -> None:
        self._arriving: dict[Hashable, PartialMessage] = {}
        self._memory = BufferPool()
        self._begun_at: dict[Hashable, float] = {}
        """Connection -> when its newest message began, if that was within `shm.KEEP_S`."""
        self._is_kept = False
        """Whether to retain unused memory, because it was soon needed again."""

    def take(self, source: Hashable, frames: Frames, bytes_max: int) -> Frames | None:
        """The frames of a whole message; None while it is incomplete, or if some of it is lost.

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
            self._arriving.pop(source, None)  # The new message may reuse its memory.
            before, now = self._begun_at.get(source, -math.inf), time.monotonic()
            self._is_kept, self._begun_at[source] = now < before + shm.KEEP_S, now
            self._arriving[source] = self._begun(number, frames[1], frames[2:], bytes_max)
            return None
        if kind != _SEGMENT or len(frames) != 2:
            raise RemoteProtocolError("this is no segment of a message")
        arriving = self._arriving.get(source)
        if arriving is None or arriving.number != number:
            return None  # Its first message is lost.
        is_next = arriving.put(place, frames[1])
        if is_next and arriving.left:
            return None
        del self._arriving[source]
        return arriving.frames if is_next else None

    def coming(self, source: Hashable) -> PartialMessage | None:
        """The partial message of this connection, if `STEP_BYTES` more of it have arrived than at
        the last call that returned it.
        """
        arriving = self._arriving.get(source)
        if arriving is None:
            return None
        there = sum(arriving.come)
        if there - arriving.reported < STEP_BYTES:
            return None
        arriving.reported = there
        return arriving

    def trim(self) -> None:
        """Release memory that is unlikely to be needed soon."""
        if not self._is_kept:
            self._memory.trim()

    def check(self) -> None:
        """A chore: discard messages whose next segment is overdue."""
        now = time.monotonic()
        self._begun_at = {k: at for k, at in self._begun_at.items() if now < at + shm.KEEP_S}
        self._arriving = {k: a for k, a in self._arriving.items() if now < a.seen_at + PATIENCE_S}
        self._memory.check()

    def _begun(self, number: int, packed: Frame, rest: Frames, bytes_max: int) -> PartialMessage:
        lengths = shm_layout.unpack(packed, rest, bytes_max)
        are_both = any(n and len(frame) for n, frame in zip(lengths, rest, strict=True))
        if not any(lengths) or lengths[0] or are_both:  # Segmented, yet not empty.
            raise RemoteProtocolError("the frame lengths of a segmented message are invalid")
        places, total = shm_layout.places(lengths)
        try:
            memory = self._memory.take(total)
        except MemoryError:
            raise RemoteProtocolError(f"no memory for a message of {total} bytes") from None
        left = deque(
            (which, place, memory[place : place + length])
            for which, (length, place) in enumerate(zip(lengths, places, strict=True))
            if length
        )
        frames = shm_layout.join(memory.data, lengths, rest)
        return PartialMessage(number, frames, list(map(len, rest)), left, time.monotonic())
