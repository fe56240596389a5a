"""Large messages travel in segments: while one is put in its place, the next ones are on their way.

What ZeroMQ receives lies in new memory; for segments it is the same memory again and again. They
are put together in one array, so that a message that comes in segments costs one copy and is
otherwise what it would have been: whole, or not there. Segments of one connection come in order;
where one is missing, the message is dropped, and the roles repeat it.

    a segment    [head, bytes]
    the rest     [head, lengths of the frames that came so, frames ...]; those are empty here
"""

from __future__ import annotations

import struct
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from daemons import large
from dlctl.errors import RemoteProtocolError
from dlctl.messages import Array
from dlctl.recycled import Recycled
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
_HEAD = struct.Struct("<4sQQQ")
"""Which of the two it is, number of the message, bytes of all its segments, place of this one."""
_SEGMENT, _REST = b"\xc1seg", b"\xc1all"
_FOREIGN = 0xC1
"""No msgpack begins with this byte, so no header of a message does."""


def are_large(frames: Frames) -> bool:
    """Whether a message has to be cut."""
    return large.are_large(frames, FRAME_BYTES_MIN)


def cut(frames: Frames, number: int) -> Iterator[Frames]:
    """The messages that a large one travels as. `number`: another one for every message."""
    lengths, rest = large.split(frames, FRAME_BYTES_MIN)
    places, total = large.places(lengths)
    size = max(SEGMENT_BYTES, -(-total // SEGMENTS_MAX))
    for frame, length, place in zip(frames, lengths, places, strict=True):
        for lo in range(0, length, size):
            head = _HEAD.pack(_SEGMENT, number, total, place + lo)
            yield [head, memoryview(frame)[lo : lo + size]]
    yield [_HEAD.pack(_REST, number, total, 0), large.pack(lengths), *rest]


@dataclass(slots=True)
class _Partial:
    """What has come of a message so far."""

    number: int
    array: Array
    """uint8[total]"""
    seen_at: float
    nbytes: int = 0
    end: int = 0
    """Where the newest segment ends."""


class Assembly:
    """Puts together what comes over any number of connections, one message of each at a time."""

    def __init__(self) -> None:
        self._partials: dict[Hashable, _Partial] = {}
        self._memory = Recycled()

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
        kind, number, total, place = _HEAD.unpack(head)
        if total > bytes_max:
            raise RemoteProtocolError(f"a message of {total} bytes; at most {bytes_max}")
        if kind == _SEGMENT and len(frames) == 2:
            self._put(source, number, total, place, frames[1])
            return None
        if kind != _REST:
            raise RemoteProtocolError("this is no segment of a message")
        return self._whole(source, number, frames[1], frames[2:])

    def check(self) -> None:
        """A chore: forget what nobody goes on with."""
        oldest = time.monotonic() - PATIENCE_S
        for source, partial in list(self._partials.items()):
            if partial.seen_at < oldest:
                del self._partials[source]
        self._memory.check()

    def _put(self, source: Hashable, number: int, total: int, place: int, data: Frame) -> None:
        if place == 0:
            self._partials[source] = _Partial(number, self._room(total), 0.0)
        partial, end = self._partials.get(source), place + len(data)
        if partial is None or partial.number != number:
            return  # Its beginning is lost.
        if not 0 <= place - partial.end < large.ALIGNMENT or end > partial.array.size:
            return  # One before it is lost: the rest will not fit.
        partial.array[place:end] = np.frombuffer(data, np.uint8)
        partial.nbytes, partial.end = partial.nbytes + len(data), end
        partial.seen_at = time.monotonic()

    def _room(self, nbytes: int) -> Array:
        try:
            return self._memory.take(nbytes)
        except MemoryError:
            raise RemoteProtocolError(f"no memory for a message of {nbytes} bytes") from None

    def _whole(self, source: Hashable, number: int, packed: Frame, rest: Frames) -> Frames | None:
        if len(rest) > FRAMES_MAX:
            raise RemoteProtocolError(f"{len(rest)} frames; at most {FRAMES_MAX}")
        lengths = large.unpack(packed, len(rest))
        partial = self._partials.pop(source, None)
        _, total = large.places(lengths)
        if partial is None or (
            (partial.number, partial.nbytes, partial.array.size) != (number, sum(lengths), total)
        ):
            return None
        return large.join(partial.array.data, lengths, rest)
