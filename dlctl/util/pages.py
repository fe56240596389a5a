"""Pages of memory that several processes share: who is done with some need not keep them resident.

They stay where they are, and whoever looks at them again finds them there.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BLOCK_BYTES = 8 << 20
"""Of what is copied before the pages of both sides are let go."""


def copy(target: Array, source: Array) -> None:
    """target[:] = source, block by block: no more of what is shared is resident here meanwhile."""
    step = max(1, BLOCK_BYTES // target.itemsize)
    for lo in range(0, len(target), step):
        block = slice(lo, lo + step)
        target[block] = source[block]
        let_go(target[block])
        let_go(source[block])


def let_go(array: Array) -> None:
    """If it is in one piece and in a file that is mapped; what others have is theirs."""
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
    """The bytes of the pages that lie within these as a whole."""
    page = mmap.PAGESIZE
    return -(-lo // page) * page, hi // page * page
