"""Vectors of one size in an anonymous file (memfd) that several processes have open: the memory is
freed when the last of them exits, however it ends, and nothing is left behind.

Untouched pages take no memory. A process can unmap pages that it does not need any more; they stay
in the file, mapped by the others.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlctl.util import pages


class SharedVectors:
    """count times float32[size], each at the begin of a page."""

    def __init__(self, file: int, size: int, count: int, *, header_bytes: int = 0) -> None:
        """file: a descriptor, of `nbytes` bytes. header_bytes: whole pages before the vectors.
        Raises OSError.
        """
        self.size = size
        self._count, self._header = count, header_bytes
        self._stride = _stride(size)
        self.mapped = mmap.mmap(file, nbytes(size, count, header_bytes=header_bytes))
        self._begin = np.frombuffer(self.mapped, np.uint8).ctypes.data

    def _at(self, number: int, element: int) -> int:
        return self._header + number * self._stride + 4 * element

    def array(self, number: int, lo: int, hi: int) -> npt.NDArray[np.float32]:
        """The elements [lo, hi) of a vector."""
        at = self._at(number, lo)
        return np.ndarray(hi - lo, np.float32, self.mapped, at)  # No view of a larger one.

    def vector(self, number: int) -> Tensor:
        """float32[size]: the vector with this number, in the shared memory."""
        return torch.from_numpy(self.array(number, 0, self.size))

    def place(self, array: npt.NDArray[np.generic]) -> tuple[int, int] | None:
        """The number of the vector that an array is in, and the index of its first element there;
        None: it is in no vector.
        """
        at = array.ctypes.data - self._begin - self._header
        is_here = 0 <= at < self._count * self._stride and array.ndim == 1
        if not (is_here and array.dtype == np.float32 and array.flags.c_contiguous):
            return None
        number, place = divmod(at, self._stride)
        return number, place // 4

    def clear(self, number: int, lo: int, hi: int) -> None:
        """Zero these elements of a vector, for all processes, and free their memory."""
        begin, end = self._at(number, lo), self._at(number, hi)
        first, last = pages.inner(begin, end)
        try:
            self.mapped.madvise(mmap.MADV_REMOVE, first, max(0, last - first))
        except OSError:  # The kernel does not support it.
            last = first
        for at, until in ((begin, min(first, end)), (max(last, begin), end)):
            ctypes.memset(self._begin + at, 0, max(0, until - at))

    def free(self, number: int, parts: Iterable[tuple[int, int]]) -> None:
        """Unmap these elements [lo, hi) of a vector in this process; an access maps them again."""
        for lo, hi in parts:
            pages.free(self.array(number, lo, hi))


def nbytes(size: int, count: int, *, header_bytes: int = 0) -> int:
    """Bytes of the file for `count` vectors; two sizes of one vector have different ones."""
    return header_bytes + max(0, count - 1) * _stride(size) + 4 * size


def _stride(size: int) -> int:
    """Bytes from one vector to the next."""
    return -(-4 * size // mmap.PAGESIZE) * mmap.PAGESIZE
