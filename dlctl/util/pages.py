"""Pages of shared memory: a process that is done with some need not keep them resident.

Their content stays, and a later access maps them again.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BLOCK_BYTES = 8 << 20
"""Bytes copied before the pages of both sides are released."""


def copy(target: Array, source: Array) -> None:
    """target[:] = source, block by block: at most one block of shared memory is resident here."""
    step = max(1, BLOCK_BYTES // target.itemsize)
    for lo in range(0, len(target), step):
        block = slice(lo, lo + step)
        target[block] = source[block]
        free(target[block])
        free(source[block])


def free(array: Array) -> None:
    """Release an array's pages in this process, if it is contiguous and in a mapped file."""
    base: Any = array
    while not isinstance(base, mmap.mmap):
        base = base.base if isinstance(base, np.ndarray) else getattr(base, "obj", None)
        if base is None:
            return
    at = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    lo, hi = inner(at, at + array.nbytes)
    if lo < hi:
        base.madvise(mmap.MADV_DONTNEED, lo, hi - lo)


def inner(lo: int, hi: int) -> tuple[int, int]:
    """The bytes [lo, hi) of the whole pages within these bytes."""
    page = mmap.PAGESIZE
    return -(-lo // page) * page, hi // page * page
