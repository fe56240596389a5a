"""The memory that a message is received into: bytes not received yet are undefined, here NaN."""

from __future__ import annotations

from dlctl.wire import codec
from dlctl.wire.messages import Message

_NOT_COME = b"\xff"
"""Fills memory that has not arrived: as a float of any length it is NaN."""


class PushInParts:
    def __init__(self, frames: codec.Frames) -> None:
        """frames: as sent; they are copied on arrival."""
        self._frames = frames
        self._memory = [bytearray(_NOT_COME) * len(frame) for frame in frames]
        self._memory[0][:] = frames[0]

    def come(self, share: float) -> tuple[Message, tuple[int, ...]]:
        """The message after arrival of this share of its arrays, and the bytes received of each."""
        left = int(share * sum(map(len, self._frames[1:])))
        come = []
        for frame, memory in zip(self._frames[1:], self._memory[1:], strict=True):
            come.append(min(left, len(frame)))
            memory[: come[-1]] = frame[: come[-1]]
            left -= come[-1]
        frames = [memoryview(memory).toreadonly() for memory in self._memory]
        return codec.decode(frames), tuple(come)
