"""Memory for large messages that is used again as soon as nobody looks at it any more.

New memory is handed out by the kernel page by page, and cleared before: for a message of 100 MB
that takes longer than to copy it.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence

import numpy as np

from dlctl.messages import Array

FREE_MAX = 2
KEEP_S = 10.0
"""Then what nobody has used is given back."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 64 << 20, 32 << 20


def keep_freed_memory() -> None:
    """Have the C library use again what ZeroMQ and Python have freed, up to 64 MiB, before it goes
    back to the kernel. A library without `mallopt` goes on as it does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


class Recycled:
    """Hands out uint8[n]; whoever drops it, and all views of it, has given it back."""

    def __init__(self, free_max: int = FREE_MAX) -> None:
        """free_max: pieces that are kept although nobody uses them."""
        self._free_max = free_max
        self._arrays: list[Array] = []
        self._used_at = 0.0

    def take(self, nbytes: int) -> Array:
        """uint8[nbytes] of any content, which nobody else has."""
        self._used_at = time.monotonic()
        free = self._free()
        fitting = [i for i in free if nbytes <= self._arrays[i].size <= 2 * nbytes]
        if fitting:
            return self._arrays[fitting[0]][:nbytes]
        self._drop(free[: max(0, len(free) + 1 - self._free_max)])
        self._arrays.append(np.empty(nbytes, np.uint8))
        return self._arrays[-1][:]

    def check(self) -> None:
        """A chore: give back what has not been of use for a while."""
        if self._arrays and time.monotonic() - self._used_at > KEEP_S:
            self._drop(self._free())

    def _free(self) -> list[int]:
        return [i for i, unused in enumerate(are_unused(self._arrays)) if unused]

    def _drop(self, places: Sequence[int]) -> None:
        for i in sorted(places, reverse=True):
            del self._arrays[i]


def are_unused(arrays: list[Array]) -> list[bool]:
    """Of each array: whether nothing but this list holds it. Every view of it does."""
    return [count == _UNUSED for count in _references(arrays)]


def _references(arrays: list[Array]) -> list[int]:
    """How many there are to each, those of this function included."""
    return [sys.getrefcount(array) for array in arrays]


_UNUSED = _references([np.empty(0, np.uint8)])[0]
"""For an array that nothing but its list holds: interpreters count in different ways."""
