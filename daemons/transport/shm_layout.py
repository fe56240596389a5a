"""Layout of a message's large frames in one block of memory; small frames stay in the message.

split    (lengths of the frames that are moved, 0 for one that stays; the rest, b"" for one that
         is moved)
join     the inverse
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from dlctl.errors import RemoteProtocolError
from dlctl.wire.codec import FRAMES_MAX, Frame, Frames

ALIGNMENT = 64
"""Each frame begins at a multiple of so many bytes, so that it may hold an array of any dtype."""


def split(frames: Frames, bytes_min: int) -> tuple[list[int], Frames]:
    """The lengths of the frames that are moved, and the frames that stay."""
    lengths = [len(frame) if len(frame) >= bytes_min else 0 for frame in frames]
    rest = [b"" if length else frame for frame, length in zip(frames, lengths, strict=True)]
    return lengths, rest


def places(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of frames of these lengths in the memory, and the total size in bytes."""
    found, at = [], 0
    for length in lengths:
        found.append(at)
        at += -(-length // ALIGNMENT) * ALIGNMENT
    return found, at


def join(memory: memoryview, lengths: Sequence[int], rest: Frames) -> Frames:
    """The frames of a message; those that were moved are views of `memory`."""
    found, _ = places(lengths)
    return [
        memory[place : place + length] if length else frame
        for frame, length, place in zip(rest, lengths, found, strict=True)
    ]


def pack(lengths: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(lengths)}Q", *lengths)


def unpack(packed: Frame, rest: Frames, bytes_max: int) -> list[int]:
    """The lengths of a message's frames. Raises RemoteProtocolError unless they fit to this rest,
    and the message has at most `bytes_max` bytes.
    """
    if len(rest) > FRAMES_MAX or len(packed) != 8 * len(rest):
        raise RemoteProtocolError(f"{len(packed)} bytes are not the lengths of {len(rest)} frames")
    lengths = list(struct.unpack(f"<{len(rest)}Q", packed))
    nbytes = places(lengths)[1] + sum(map(len, rest))
    if nbytes > bytes_max:
        raise RemoteProtocolError(f"a message of {nbytes} bytes; at most {bytes_max}")
    return lengths
