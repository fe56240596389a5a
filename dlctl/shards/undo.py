"""What a sparse update has found where it writes, kept until the update is committed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dlctl.messages import Array
from dlctl.shards.base import Unusable
from dlctl.util.threads import PLACES

_WORD = 2**64 - 1
_IS_MARK = 1 << 63
_SUM_MODULUS = 2**31 - 1
"""No power of two is a multiple of it, so every flipped bit changes a sum."""


@dataclass(frozen=True, slots=True)
class Undo:
    """What a sparse update has found where it writes, in blocks of `PLACES` elements.

    A block is saved, then marked, and then overwritten. The record is of the update that becomes
    one certain commit; when that is written it says nothing any more.
    """

    number: Array
    """uint64[2]: of the commit that will be, and its complement."""
    marks: Array
    """uint64, for each block: how many elements it has and their sum; 0: it was not saved."""
    words: list[Array]
    """uint64: the parts below, in their order."""
    indices: Array
    values: list[Array]
    """One part for each vector, of its dtype."""

    def begin(self, number: int) -> None:
        """Nothing is saved yet of the update that becomes this commit."""
        self.marks[:] = 0
        self.number[:] = number, number ^ _WORD

    def cut(self, lo: int, hi: int) -> tuple[Array, list[Array]]:
        """(indices, the old values of each vector) of elements of the update."""
        return self.indices[lo:hi], [values[lo:hi] for values in self.values]

    def mark(self, lo: int, hi: int) -> None:
        """The block that begins at `lo` is saved: from now on it may be overwritten."""
        self.marks[lo // PLACES] = self._mark(lo, hi)

    def _mark(self, lo: int, hi: int) -> int:
        """Where a part ends within a word, the rest of that word counts: nobody writes there."""
        total = 0
        for words, part in zip(self.words, (self.indices, *self.values), strict=True):
            begin, end = lo * part.itemsize // 8, -(-hi * part.itemsize // 8)
            total += int(np.add.reduce(words[begin:end]))
        return _IS_MARK | (total % 2**64 % _SUM_MODULUS) << 32 | hi - lo

    def pending(self, number: int, size: int) -> Iterator[tuple[Array, list[Array]]]:
        """(indices, old values) of each block to be put back, if commit `number` never came.

        Raises Unusable if anything in it is damaged.
        """
        found, complement = self.number.tolist()
        if found != complement ^ _WORD:
            if self.marks.any():  # Otherwise a kill came between the two.
                raise Unusable("its undo record is damaged")
            return
        if found > number:
            raise Unusable(f"its newest commit is number {number - 1}; it had a later one")
        if found < number:
            return
        for block in np.flatnonzero(self.marks).tolist():
            mark, lo = int(self.marks[block]), block * PLACES
            hi = lo + (mark & 0xFFFFFFFF)
            if not lo < hi <= min(lo + PLACES, self.indices.size) or self._mark(lo, hi) != mark:
                raise Unusable("its undo record is damaged")
            indices, values = self.cut(lo, hi)
            if not 0 <= int(indices.min()) <= int(indices.max()) < size:
                raise Unusable("its undo record has elements beyond the shard")
            yield indices, values
