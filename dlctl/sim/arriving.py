"""The memory that a message comes into: what has not come yet holds anything, here only NaN."""

from __future__ import annotations

from dlctl import wire
from dlctl.messages import Message

_NOT_COME = b"\xff"
"""As a float of any length it is NaN."""


class Arriving:
    def __init__(self, frames: wire.Frames) -> None:
        """As they were sent: they are read when they come."""
        self._frames = frames
        self._memory = [bytearray(_NOT_COME) * len(frame) for frame in frames]
        self._memory[0][:] = frames[0]

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(map(len, self._frames[1:]))

    def come(self, nbytes: int) -> Message:
        """The message when the first `nbytes` bytes of its arrays have come."""
        for frame, memory in zip(self._frames[1:], self._memory[1:], strict=True):
            count = min(nbytes, len(frame))
            memory[:count] = frame[:count]
            nbytes -= count
        return wire.decode([memoryview(memory).toreadonly() for memory in self._memory])
