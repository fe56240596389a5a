"""The large frames of a message, side by side in one piece of memory; the small ones stay.

split    (lengths of the frames that are taken out, 0 for one that stays; what stays, b"" for
         one that is taken out)
join     the frames again
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from dlctl.errors import RemoteProtocolError
from dlctl.wire import Frame, Frames

ALIGNMENT = 64
"""Of each frame in the memory: arrays of any type may lie there."""


def are_large(frames: Frames, bytes_min: int) -> bool:
    """Whether a message has a frame of so many bytes."""
    return any(len(frame) >= bytes_min for frame in frames)


def split(frames: Frames, bytes_min: int) -> tuple[list[int], Frames]:
    """What is taken out of a message, and what stays of it."""
    lengths = [len(frame) if len(frame) >= bytes_min else 0 for frame in frames]
    rest = [b"" if length else frame for frame, length in zip(frames, lengths, strict=True)]
    return lengths, rest


def places(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where frames of these lengths begin in the memory, and how much of it they need."""
    found, at = [], 0
    for length in lengths:
        found.append(at)
        at += -(-length // ALIGNMENT) * ALIGNMENT
    return found, at


def join(memory: memoryview, lengths: Sequence[int], rest: Frames) -> Frames:
    """The frames of a message; those that were taken out are views."""
    found, _ = places(lengths)
    return [
        memory[place : place + length] if length else frame
        for frame, length, place in zip(rest, lengths, found, strict=True)
    ]


def pack(lengths: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(lengths)}Q", *lengths)


def unpack(packed: Frame, count: int) -> list[int]:
    """Raises RemoteProtocolError unless these are the lengths of `count` frames."""
    if len(packed) != 8 * count:
        raise RemoteProtocolError("the lengths of a message's frames are not given")
    return list(struct.unpack(f"<{count}Q", packed))
