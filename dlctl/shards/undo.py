"""The undo record: the old values under a sparse update, stored until the update is committed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dlctl.shards.errors import Unusable
from dlctl.util.threads import PLACES
from dlctl.wire.messages import Array

_WORD = 2**64 - 1
_IS_MARK = 1 << 63
_SUM_MODULUS = 2**31 - 1
"""No power of two is a multiple of it, so every flipped bit changes a sum."""


@dataclass(frozen=True, slots=True)
class Undo:
    """The old values under a sparse update, in blocks of `PLACES` elements.

    A block is saved, then marked, and then overwritten. The record belongs to one future commit;
    once that is written, the record is void.
    """

    number: Array
    """uint64[2]: of the future commit, and its complement."""
    marks: Array
    """uint64 per block: its number of elements and their sum; 0: it was not saved."""
    words: list[Array]
    """uint64: the parts below, in their order."""
    indices: Array
    values: list[Array]
    """One part for each vector, of its dtype."""

    def begin(self, number: int) -> None:
        """Start the record of the update of commit `number`, with nothing saved."""
        self.marks[:] = 0
        self.number[:] = number, number ^ _WORD

    def cut(self, lo: int, hi: int) -> tuple[Array, list[Array]]:
        """(indices, old values per vector) of elements [lo, hi) of the update."""
        return self.indices[lo:hi], [values[lo:hi] for values in self.values]

    def mark(self, lo: int, hi: int) -> None:
        """Mark the block that begins at `lo` as saved: its elements may be overwritten."""
        self.marks[lo // PLACES] = self._mark(lo, hi)

    def _mark(self, lo: int, hi: int) -> int:
        """A checksum of a part, with all of its last word, whose rest never changes."""
        total = 0
        for words, part in zip(self.words, (self.indices, *self.values), strict=True):
            begin, end = lo * part.itemsize // 8, -(-hi * part.itemsize // 8)
            total += int(np.add.reduce(words[begin:end]))
        return _IS_MARK | (total % 2**64 % _SUM_MODULUS) << 32 | hi - lo

    def pending(self, number: int, size: int) -> Iterator[tuple[Array, list[Array]]]:
        """(indices, old values) of each block to roll back, if commit `number` was not written.

        Raises Unusable if anything in it is damaged.
        """
        found, complement = self.number.tolist()
        if found != complement ^ _WORD:
            if self.marks.any():  # Else a kill came between the two stores.
                raise Unusable("its undo record is damaged")
            return
        if found > number:
            raise Unusable(f"its newest commit is number {number - 1}, but it had a later one")
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
