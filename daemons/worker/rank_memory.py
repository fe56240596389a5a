"""Host memory that all ranks of a replica share: vectors of the model's size, of which each rank
writes and reads its own parts.

It is one file without a name, which the ranks inherit, so nothing is left when they have ended.
Pages that nobody has touched take no memory. Rank 0, whose method reads and writes whole vectors,
lets go of the other ranks' pages before each step: they stay in the file, and are mapped by those
who compute with them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

PARAMETERS, GRADIENT, GIVEN = 0, 1, 2
"""The numbers of the vectors: what is trained; a gradient of the whole replica; a vector that rank
0 has for all of them.
"""
STATES = 3
"""From here on: what optimisers keep of each element."""
VECTORS = STATES + 6


class RankMemory:
    """VECTORS times float32[size]."""

    def __init__(self, file: int, size: int) -> None:
        """file: one that all ranks have open. Raises OSError."""
        self.size = size
        self._stride = -(-4 * size // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(file, VECTORS * self._stride)
        self._memory = mmap.mmap(file, VECTORS * self._stride)

    def vector(self, number: int) -> Tensor:
        """float32[size]."""
        at = number * self._stride
        return torch.frombuffer(self._memory, dtype=torch.float32, count=self.size, offset=at)

    def clear(self, number: int) -> None:
        """Give back what a vector takes, which has no values then, for all ranks."""
        with suppress(OSError):  # A kernel that cannot do that.
            self._memory.madvise(mmap.MADV_REMOVE, number * self._stride, self._stride)

    def let_go(self, parts: Iterable[tuple[int, int]]) -> None:
        """Do without these elements [lo, hi) of all vectors here; who looks at one has it again."""
        for lo, hi in _pages(parts):
            for number in range(VECTORS):
                self._memory.madvise(mmap.MADV_DONTNEED, number * self._stride + lo, hi - lo)


def others(mine: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """What is in none of these parts of [0, size)."""
    end = 0
    for lo, hi in [*sorted(mine), (size, size)]:
        if end < lo:
            yield end, lo
        end = max(end, hi)


def _pages(parts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The bytes of whole pages that these elements of a vector have."""
    page = mmap.PAGESIZE
    for lo, hi in parts:
        first, last = -(-4 * lo // page) * page, 4 * hi // page * page
        if first < last:
            yield first, last
