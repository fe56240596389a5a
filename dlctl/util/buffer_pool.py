"""Memory for large messages that is used again as soon as nobody looks at it any more.

New memory is handed out by the kernel page by page, and cleared before: for a message of 100 MB
that takes longer than to copy it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FREE_MAX = 2
LOOKS_MAX = 64
"""Pieces that are looked at for one that is free: a search of all, for each of many that are handed
out at once, would take as long as the square of their number."""
IDLE_CHECKS = 10
"""After so many what nobody has used is given back."""


Array = npt.NDArray[Any]


class BufferPool:
    """Hands out uint8[n]; whoever drops it, and all views of it, has given it back."""

    def __init__(self, free_max: int = FREE_MAX) -> None:
        """free_max: pieces that are kept although nobody uses them."""
        self._free_max = free_max
        self._arrays: list[Array] = []
        self._idle_checks = 0
        self._next = 0
        """Where to look first."""

    def take(self, nbytes: int) -> Array:
        """uint8[nbytes] of any content, which nobody else has."""
        self._idle_checks = 0
        at, others = self._find(nbytes)
        if at is None:
            self._drop(others[: max(0, len(others) + 1 - self._free_max)])
            self._arrays.append(np.empty(nbytes, np.uint8))
            at = len(self._arrays) - 1
        return self._arrays[at][:nbytes]

    def _find(self, nbytes: int) -> tuple[int | None, list[int]]:
        """The place of a piece that is free and fits, and of free ones on the way that do not. What
        was handed out longest ago is most often free: it is looked at first. Of very many only some
        are looked at, and the next ones the next time.
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
        """Give back at once what nobody uses."""
        if self._arrays:
            self._drop(self._free())

    def check(self) -> None:
        """To be called once a second: give back what has not been of use for a while."""
        self._idle_checks += 1
        if self._arrays and self._idle_checks > IDLE_CHECKS:
            self._drop(self._free())

    def _free(self) -> list[int]:
        return [i for i in range(len(self._arrays)) if is_unused(self._arrays, i)]

    def _drop(self, places: Sequence[int]) -> None:
        for i in sorted(places, reverse=True):
            del self._arrays[i]


def is_unused(arrays: Sequence[Array], at: int) -> bool:
    """Whether nothing but this list holds an array. Every view of it does."""
    return _references(arrays, at) == _UNUSED


def _references(arrays: Sequence[Array], at: int) -> int:
    """How many there are to one of them, those of this function included."""
    return sys.getrefcount(arrays[at])


_UNUSED = _references([np.empty(0, np.uint8)], 0)
"""For an array that nothing but its list holds: interpreters count in different ways."""
