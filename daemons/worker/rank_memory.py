"""Host memory that all ranks of a replica share: vectors of the model's size, of which each rank
writes and reads its own parts.

It is one anonymous file (memfd) that the ranks inherit, so nothing is left when they have exited.
Untouched pages take no memory. A rank unmaps the pages that it has read outside its own parts; they
stay in the file, mapped by the ranks that compute with them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlctl.util import pages

PARAMETERS, STATES = 0, 1
"""Numbers of vectors: the trained parameters; from STATES on, optimiser state of each element."""
FREE = STATES + 6
"""From here on: gradients, and vectors of the method (`spread.py`)."""
VECTORS = FREE + 64
ALIGNED = mmap.PAGESIZE // 4
"""Elements of a page."""


class RankMemory:
    """VECTORS times float32[size]."""

    def __init__(self, file: int, size: int) -> None:
        """file: a descriptor that all ranks have open. Raises OSError."""
        self.size = size
        self._stride = -(-size // ALIGNED) * mmap.PAGESIZE
        os.ftruncate(file, VECTORS * self._stride)
        self._memory = mmap.mmap(file, VECTORS * self._stride)
        self._begin = np.frombuffer(self._memory, np.uint8).ctypes.data

    def array(self, number: int, lo: int, hi: int) -> npt.NDArray[np.float32]:
        """The elements [lo, hi) of a vector."""
        at = number * self._stride + 4 * lo
        return np.ndarray(hi - lo, np.float32, self._memory, at)  # No view of a larger one.

    def vector(self, number: int) -> Tensor:
        """float32[size]."""
        return torch.from_numpy(self.array(number, 0, self.size))

    def place(self, array: npt.NDArray[np.generic]) -> tuple[int, int] | None:
        """The number of the vector that an array is in, and the index of its first element there;
        None: it is in no vector.
        """
        at = array.ctypes.data - self._begin
        is_here = 0 <= at < VECTORS * self._stride and array.ndim == 1
        if not (is_here and array.dtype == np.float32 and array.flags.c_contiguous):
            return None
        number, place = divmod(at, self._stride)
        return number, place // 4

    def clear(self, number: int, lo: int, hi: int) -> None:
        """Zero these elements of a vector, for all ranks, and free their memory."""
        begin, end = number * self._stride + 4 * lo, number * self._stride + 4 * hi
        first, last = pages.inner(begin, end)
        try:
            self._memory.madvise(mmap.MADV_REMOVE, first, max(0, last - first))
        except OSError:  # The kernel does not support it.
            last = first
        for at, until in ((begin, min(first, end)), (max(last, begin), end)):
            ctypes.memset(self._begin + at, 0, max(0, until - at))

    def free(self, number: int, parts: Iterable[tuple[int, int]]) -> None:
        """Unmap these elements [lo, hi) of a vector in this process; an access maps them again."""
        for lo, hi in parts:
            pages.free(self.array(number, lo, hi))


def others(mine: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The gaps between these parts of [0, size)."""
    end = 0
    for lo, hi in [*sorted(mine), (size, size)]:
        if end < lo:
            yield end, lo
        end = max(end, hi)
