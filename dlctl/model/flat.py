"""A model as one float32 vector: the position of each tensor, and the slice of each shard.

A model has three kinds of tensors. Only the first is trained and sent all the time:

- `trained`: a parameter with requires_grad; a slice of the flat vector, float32 whatever its dtype.
- `averaged`: a buffer (BatchNorm statistics); averaged over the replicas by samples.
- `constant`: a frozen parameter; equal in all workers, in no vector (`dlctl/model/frozen.py`).

Beside the model a task may have tables of rows, `rows`, which only servers hold
(`dlctl/shards/rows.py`).

A tied parameter has one entry; its other names are in `aliases`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

from dlctl.errors import RemoteProtocolError

TRAINED = "trained"
AVERAGED = "averaged"
CONSTANT = "constant"
ROWS = "rows"
INITS = ("constant", "uniform", "normal")
"""Initial values of rows: (value, 0), (from, to), (mean, standard deviation)."""
KINDS = (TRAINED, AVERAGED, CONSTANT, ROWS)
NAMED_MAX = 20
"""So many tensors are named where two models differ."""
DIMENSIONS_MAX = 64
"""The largest number of dimensions of a tensor in torch and numpy."""
ELEMENTS_MAX = 2**48
"""Elements of all tensors of one kind: a petabyte, in numbers that fit into every message."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the model. `dtype` is torch's name without the prefix: "float32"."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    init: tuple[str, float, float] | None = None
    """How the rows of a table of rows are initialised (`rows.initial`); None: no table of rows."""

    @property
    def size(self) -> int:
        """The number of elements of the tensor."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a model, in the order of their vectors."""

    entries: tuple[TensorEntry, ...]

    def slices(self, kind: str) -> Iterator[tuple[TensorEntry, int, int]]:
        """(entry, lo, hi) of every entry of one kind, in the flat vector of that kind."""
        lo = 0
        for entry in self.entries:
            if entry.kind == kind:
                yield entry, lo, lo + entry.size
                lo += entry.size

    def size(self, kind: str = TRAINED) -> int:
        """Length of the flat vector of one kind."""
        return sum(entry.size for entry in self.entries if entry.kind == kind)

    def difference(self, before: Layout) -> str:
        """The tensors that differ, as in '"0.bias" is float32[3], was float32[4]'; the first
        `NAMED_MAX`, and how many more there are.
        """
        now_is, was = (
            {e.name: f"{e.dtype}{[*e.shape]}" + f" {e.kind}" * (e.kind != TRAINED) for e in entries}
            for entries in (self.entries, before.entries)
        )
        names = [name for name in {**was, **now_is} if now_is.get(name) != was.get(name)]
        told = [
            f'"{name:.80}" is {now_is.get(name, "missing")}, was {was.get(name, "missing")}'
            for name in names[:NAMED_MAX]
        ]
        more = len(names) - NAMED_MAX
        told += [f"and {more} more differ"] * (more > 0)
        return "; ".join(told) or "its tensors have another order, or other names are shared"

    def to_rows(self) -> list[list[Any]]:
        """[[name, kind, shape, dtype, aliases], ...]: data for JSON; for rows the init, too."""
        return [
            [e.name, e.kind, [*e.shape], e.dtype, [*e.aliases], *([[*e.init]] if e.init else [])]
            for e in self.entries
        ]

    @staticmethod
    def from_rows(rows: list[list[Any]]) -> Layout:
        return Layout(
            tuple(
                TensorEntry(name, kind, tuple(shape), dtype, tuple(aliases), *map(tuple, init))
                for name, kind, shape, dtype, aliases, *init in rows
            )
        )

    def to_bytes(self) -> bytes:
        """JSON; equal on two replicas if and only if they built the same model."""
        return json.dumps(self.to_rows()).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Layout:
        """Decode a layout. Raises RemoteProtocolError for what `to_bytes` would not have made."""
        try:
            rows = json.loads(data)
            check_rows(rows)
            return Layout.from_rows(rows)
        except (ValueError, TypeError, RecursionError) as error:
            raise RemoteProtocolError(
                f"this describes no model: {error}",
                hint="see the log of the worker that built it",
            ) from None


def check_rows(rows: Any) -> None:
    """Raises ValueError naming the first thing in `rows` that `Layout.to_rows` would not make."""
    if type(rows) is not list:
        raise ValueError("a layout is a list of entries")
    for row in rows:
        _check_row(row)
    whole = Layout.from_rows(rows)
    for kind in KINDS:
        if whole.size(kind) > ELEMENTS_MAX:
            raise ValueError(f"a model has at most {ELEMENTS_MAX} {kind} elements")


def _check_row(row: Any) -> None:
    if type(row) is not list or len(row) not in (5, 6):
        raise ValueError("layout has an entry that is not [name, kind, shape, dtype, aliases]")
    name, kind, shape, dtype, aliases, *init = row
    if type(name) is not str or type(dtype) is not str or kind not in KINDS:
        raise ValueError(f"layout has a wrong entry: {name!r:.60}")
    if type(shape) is not list or len(shape) > DIMENSIONS_MAX or not all(map(_is_extent, shape)):
        raise ValueError(f"layout: wrong shape of {name!r:.60}")
    if type(aliases) is not list or not all(type(alias) is str for alias in aliases):
        raise ValueError(f"layout: wrong aliases of {name!r:.60}")
    if (kind == ROWS) != bool(init) or (init and not _is_rows(shape, init[0])):
        raise ValueError(f"layout: wrong table of rows {name!r:.60}")


def _is_rows(shape: list[int], init: Any) -> bool:
    is_init = type(init) is list and len(init) == 3 and init[0] in INITS
    is_table = len(shape) == 2 and min(shape) > 0
    return is_table and is_init and all(type(n) is float and isfinite(n) for n in init[1:])


def _is_extent(value: Any) -> bool:
    return type(value) is int and 0 <= value <= ELEMENTS_MAX


def slice_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """(lo, hi) of slice `index` when `size` elements are cut into `parts` slices.

    The slices are contiguous and differ by at most one element: shards, portions and batches are
    all cut like this, so that none is ever tiny.
    """
    return size * index // parts, size * (index + 1) // parts
