"""Host memory that all ranks of a cut replica share, of which each rank writes and reads its own
parts: the model's vectors, the optimiser's, and the method's.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator

from daemons.worker.shared_vectors import SharedVectors, nbytes

PARAMETERS, STATES = 0, 1
"""Numbers of vectors: the trained parameters; from STATES on, optimiser state of each element."""
FREE = STATES + 6
"""The first vector after the states: from here on gradients, and vectors of the method
(`spread_vectors.py`).
"""
VECTORS = FREE + 64
ALIGNED = mmap.PAGESIZE // 4
"""The number of float32 elements of a page of memory."""


class RankMemory(SharedVectors):
    """Shared host memory of all ranks: VECTORS times float32[size]."""

    def __init__(self, file: int, size: int) -> None:
        """file: a descriptor that all ranks have open. Raises OSError."""
        os.ftruncate(file, nbytes(size, VECTORS))
        super().__init__(file, size, VECTORS)


def others(mine: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The gaps between these parts of [0, size)."""
    end = 0
    for lo, hi in [*sorted(mine), (size, size)]:
        if end < lo:
            yield end, lo
        end = max(end, hi)
