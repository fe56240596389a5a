"""Memory for large messages that is reused as soon as it is not referenced any more.

The kernel allocates new memory page by page, and clears it: for a message of 100 MB that takes
longer than to copy it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FREE_MAX = 2
LOOKS_MAX = 64
"""Buffers searched for a free one: to search all of them, for each of many allocations at once,
would take quadratic time."""
IDLE_CHECKS = 10
"""Checks after which unused buffers are released."""


Array = npt.NDArray[Any]


class BufferPool:
    """Allocates uint8[n]; dropping it, and all views of it, releases it."""

    def __init__(self, free_max: int = FREE_MAX) -> None:
        """free_max: unused buffers to retain."""
        self._free_max = free_max
        self._arrays: list[Array] = []
        self._idle_checks = 0
        self._next = 0
        """Where to search first."""

    def take(self, nbytes: int) -> Array:
        """uint8[nbytes] of any content, not shared."""
        self._idle_checks = 0
        at, others = self._find(nbytes)
        if at is None:
            self._drop(others[: max(0, len(others) + 1 - self._free_max)])
            self._arrays.append(np.empty(nbytes, np.uint8))
            at = len(self._arrays) - 1
        return self._arrays[at][:nbytes]

    def _find(self, nbytes: int) -> tuple[int | None, list[int]]:
        """The place of a free buffer that fits, and of other free ones found before it. The oldest
        allocation is most often free: it is searched first. Of very many buffers only some are
        searched, and the next ones the next time.
        """
        count, others = len(self._arrays), list[int]()
        for i in range(self._next, self._next + min(count, LOOKS_MAX)):
            at = i % count
            if is_unused(self._arrays, at):
                if nbytes <= self._arrays[at].size <= 2 * nbytes:
                    self._next = at + 1
                    return at, others
                others.append(at)
        self._next += LOOKS_MAX if count > LOOKS_MAX else 0
        return None, others

    def trim(self) -> None:
        """Release all unused buffers at once."""
        if self._arrays:
            self._drop(self._free())

    def check(self) -> None:
        """Called once a second: release buffers that were not used for a while."""
        self._idle_checks += 1
        if self._arrays and self._idle_checks > IDLE_CHECKS:
            self._drop(self._free())

    def _free(self) -> list[int]:
        return [i for i in range(len(self._arrays)) if is_unused(self._arrays, i)]

    def _drop(self, places: Sequence[int]) -> None:
        for i in sorted(places, reverse=True):
            del self._arrays[i]


def is_unused(arrays: Sequence[Array], at: int) -> bool:
    """Whether only this list refers to an array. Every view of it does, too."""
    return _references(arrays, at) == _UNUSED


def _references(arrays: Sequence[Array], at: int) -> int:
    """The number of references to one of the arrays, those of this function included."""
    return sys.getrefcount(arrays[at])


_UNUSED = _references([np.empty(0, np.uint8)], 0)
"""References to an array that only its list refers to: interpreters count in different ways."""
