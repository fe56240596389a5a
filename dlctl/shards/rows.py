"""Tables of rows, of which a worker only ever holds those that a batch names.

All tables of a task are concatenated row by row into one vector, and their rows are numbered in
this order: row r of the second table has the number (rows of the first) + r. The vector is cut
between rows, so that every row is on one server. The initial values of a row follow from the seed,
its table and its position there: its server computes them, and they do not depend on the number of
servers.

A push of rows is `Packed("rows", n, (numbers int32[k] or int64[k], values float32[n]))`, with
numbers from the first row of the shard on.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dlctl.compress.base import Delta
from dlctl.compress.plain import check_array
from dlctl.errors import RemoteProtocolError
from dlctl.model.flat import ROWS, Layout, TensorEntry
from dlctl.wire.messages import Array, Packed

KIND = "rows"
"""The kind of their pushes, and the name of the combined table."""
BLOCK = 1 << 20
"""Elements whose initial values are computed at once."""


class RowTables:
    """The layout of the tables in their vector."""

    def __init__(self, layout: Layout) -> None:
        self.entries: tuple[TensorEntry, ...] = tuple(e for e, _, _ in layout.slices(ROWS))
        self.rows = np.cumsum([0, *(entry.shape[0] for entry in self.entries)], dtype=np.int64)
        """Where each table begins, in rows; and the total number of rows."""
        self.elements = np.cumsum([0, *(entry.size for entry in self.entries)], dtype=np.int64)
        """Where each table begins, in elements; and the total number of elements."""
        self.widths = np.array([entry.shape[1] for entry in self.entries], np.int64)

    @property
    def size(self) -> int:
        """Elements of all tables."""
        return int(self.elements[-1])

    def cut(self, parts: int, index: int) -> tuple[int, int]:
        """The rows [lo, hi) of slice `index` of `parts` slices of similar size."""
        return self._row_at(self.size * index // parts), self._row_at(
            self.size * (index + 1) // parts
        )

    def _row_at(self, element: int) -> int:
        """The number of the row of an element."""
        if element == self.size:
            return int(self.rows[-1])
        table = int(np.searchsorted(self.elements, element, "right")) - 1
        return int(self.rows[table] + (element - self.elements[table]) // self.widths[table])

    def element_of(self, row: int) -> int:
        """The first element of a row; for the row after the last, the size."""
        if row == self.rows[-1]:
            return self.size
        table = int(np.searchsorted(self.rows, row, "right")) - 1
        return int(self.elements[table] + (row - self.rows[table]) * self.widths[table])

    def bounds(self, parts: int, index: int) -> tuple[int, int]:
        """The elements [lo, hi) of a slice."""
        lo, hi = self.cut(parts, index)
        return self.element_of(lo), self.element_of(hi)

    def by_table(self, rows: Array) -> list[tuple[int, int, int]]:
        """(table, lo, hi) for each table with some of these rows (ascending): rows [lo, hi)."""
        ends = np.searchsorted(rows, self.rows).tolist()
        return [(n, lo, hi) for n, (lo, hi) in enumerate(pairwise(ends)) if lo < hi]

    def count(self, rows: Array) -> int:
        """The elements of these rows, in ascending order."""
        return sum((hi - lo) * int(self.widths[n]) for n, lo, hi in self.by_table(rows))


class RowSlice:
    """The rows [lo, hi) of one shard; `w` is its vector, and its rows are numbered from 0."""

    def __init__(self, tables: RowTables, parts: int, index: int) -> None:
        self.tables = tables
        self.lo, self.hi = tables.cut(parts, index)
        self._first = tables.element_of(self.lo)
        self.dtype = np.dtype(np.int32 if self.hi - self.lo < 2**31 else np.int64)
        """The dtype of row numbers on the wire."""

    def part(self, rows: Array) -> tuple[int, int]:
        """Which of these rows of the tables (ascending) are in this shard: [i, j) of them."""
        i, j = np.searchsorted(rows, (self.lo, self.hi)).tolist()
        return i, j

    def check(self, numbers: Array) -> Array:
        """Received row numbers, as numbers in the tables: int64[k]. Raises RemoteProtocolError
        unless they ascend and are in this shard.
        """
        if numbers.ndim != 1 or numbers.dtype != self.dtype:
            raise RemoteProtocolError(f"rows are {self.dtype}, not {numbers.dtype}")
        ascend = bool((numbers[1:] > numbers[:-1]).all())
        if numbers.size and not (ascend and numbers[0] >= 0 and numbers[-1] < self.hi - self.lo):
            raise RemoteProtocolError(f"rows must ascend within {self.hi - self.lo}")
        return numbers.astype(np.int64) + self.lo

    def take(self, w: Array, numbers: Array) -> Array:
        """The concatenated values of these rows: float32[n]."""
        rows = self.check(numbers)
        parts = [
            np.take(self._as_rows(w, table), rows[i:j] - self._from(table), axis=0).ravel()
            for table, i, j in self.tables.by_table(rows)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, w.dtype), *parts])

    def expand(self, packed: Packed) -> Delta:
        """A push. Raises RemoteProtocolError for an invalid one."""
        if packed.kind != KIND or len(packed.arrays) != 2:
            raise RemoteProtocolError(f'it is of kind "{packed.kind:.20}", and not of rows')
        numbers, values = packed.arrays
        rows = self.check(numbers)
        check_array(values, "float32", self.tables.count(rows), "values")
        where = [
            (
                self._begin(table)
                + (rows[i:j, None] - self._from(table)) * self.tables.widths[table]
                + np.arange(self.tables.widths[table])
            ).ravel()
            for table, i, j in self.tables.by_table(rows)
        ]
        return Delta(values, where[0] if len(where) == 1 else np.concatenate([_NONE, *where]))

    def initial(self, seed: int) -> Array:
        """The initial values of all rows, float32[elements]."""
        w = np.empty(self.tables.element_of(self.hi) - self._first, np.float32)
        for table, entry in enumerate(self.tables.entries):
            rows = self._as_rows(w, table)
            block = max(1, BLOCK // entry.shape[1])
            first = self._from(table) - int(self.tables.rows[table])
            for at in range(0, len(rows), block):
                part = rows[at : at + block]
                part[:] = initial(entry, seed, table, first + at, len(part))
        return w

    def _from(self, table: int) -> int:
        """The first row of a table that is in this shard, if any is."""
        return max(self.lo, int(self.tables.rows[table]))

    def _begin(self, table: int) -> int:
        """The position of a table's first row in the slice."""
        return self.tables.element_of(self._from(table)) - self._first

    def _as_rows(self, w: Array, table: int) -> Array:
        """This shard's part of a table: [rows, width], a view."""
        lo, hi = self._from(table), min(self.hi, int(self.tables.rows[table + 1]))
        width = int(self.tables.widths[table])
        begin = self._begin(table) if lo < hi else 0
        return w[begin : begin + max(0, hi - lo) * width].reshape(-1, width)


_NONE = np.empty(0, np.int64)


def initial(entry: TensorEntry, seed: int, table: int, row: int, count: int) -> Array:
    """The initial values of `count` rows of a table, from `row` on: float32[count, width]."""
    assert entry.init is not None
    kind, a, b = entry.init
    width = entry.shape[1]
    if kind == "constant":
        return np.full((count, width), a, np.float32)
    at = np.arange(row * width, (row + count) * width, dtype=np.uint64).reshape(count, width)
    first = _uniform(at, seed, 2 * table)
    if kind == "uniform":
        return (a + (b - a) * first).astype(np.float32)
    angle = 2 * np.pi * _uniform(at, seed, 2 * table + 1)
    values: Array = a + b * np.sqrt(-2 * np.log1p(-first)) * np.cos(angle)
    return values.astype(np.float32)


def _uniform(at: Array, seed: int, stream: int) -> Array:
    """float64 in [0, 1), independent for each position: the finaliser of SplitMix64, over a
    counter."""
    key = np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0]
    x = at * np.uint64(0x9E3779B97F4A7C15) + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return np.asarray((x >> np.uint64(11)) * 2.0**-53)
