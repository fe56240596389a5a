"""K-FAC's factors of a model: the two sides of each layer, and how they are packed into vectors.

    factors   per layer: whether it was seen, A, G; of a matrix the upper triangle, row by row
    eigens    two marks per layer; then per side its eigenvectors, row by row, and eigenvalues
    updates   two marks per layer; then per layer P[g, a], row by row

A mark is 1 where the owner of a side gives it, and 0 elsewhere: after a sum it shows that no owner
is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import numpy as np

from dlctl.model.flat import TRAINED, Layout
from dlctl.wire.messages import Array

FLOAT_BYTES = 4
SIDES = 2


class Side(NamedTuple):
    """One factor of a layer."""

    size: int
    kind: Literal["matrix", "diagonal", "identity"] = "matrix"
    """diagonal: its elements are its eigenvalues. identity: too large for an eigendecomposition."""

    @property
    def factor_size(self) -> int:
        """Elements of the factor, packed."""
        n = self.size
        return {"matrix": n * (n + 1) // 2, "diagonal": n, "identity": 0}[self.kind]

    @property
    def eigen_size(self) -> int:
        """Elements of the eigenvectors and eigenvalues, packed."""
        return self.size * (self.size + 1) if self.kind == "matrix" else 0


class LayerSides(NamedTuple):
    """The sides of one layer, whose gradient is a matrix [g, a]."""

    name: str
    a: Side
    """Of its inputs, and of a 1 if it has a bias."""
    g: Side
    """Of the gradients at its outputs."""

    @property
    def elements(self) -> int:
        return self.a.size * self.g.size


class OfSide(NamedTuple):
    """Where the parts of one side are."""

    side: Side
    factor: slice
    eigen: slice


@dataclass(slots=True)
class Packing:
    """Where everything is in the packed vectors."""

    layers: tuple[LayerSides, ...]
    sides: list[tuple[OfSide, OfSide]] = field(init=False)
    """(A, G) of each layer."""
    seen: Array = field(init=False)
    """int64[layers]: the elements of the factors that say whether a layer was seen."""
    updates: list[slice] = field(init=False)
    factor_size: int = field(init=False)
    eigen_size: int = field(init=False)
    update_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.sides, self.updates, seen = [], [], []
        at, eigen_at, update_at = 0, self.marks, self.marks
        for layer in self.layers:
            seen.append(at)
            at += 1
            both = []
            for side in (layer.a, layer.g):
                factor = slice(at, at + side.factor_size)
                eigen = slice(eigen_at, eigen_at + side.eigen_size)
                both.append(OfSide(side, factor, eigen))
                at, eigen_at = factor.stop, eigen.stop
            self.sides.append((both[0], both[1]))
            self.updates.append(slice(update_at, update_at + layer.elements))
            update_at += layer.elements
        self.seen = np.array(seen, np.int64)
        self.factor_size, self.eigen_size, self.update_size = at, eigen_at, update_at

    @property
    def marks(self) -> int:
        return SIDES * len(self.layers)

    def costs(self) -> Array:
        """float64[layers, 2]: what the eigendecomposition of each side costs, up to a factor."""
        both = [[s.size**3 * (s.kind == "matrix") for s in (x.a, x.g)] for x in self.layers]
        return np.array(both, np.float64).reshape(-1, SIDES)

    def initial(self) -> Array:
        """float32[factor_size]: identities that were not seen."""
        found = np.zeros(self.factor_size, np.float32)
        for of_sides in self.sides:
            for side, factor, _ in of_sides:
                found[factor] = 1.0
                if side.kind == "matrix":
                    found[factor] = np.eye(side.size, dtype=np.float32)[upper(side.size)]
        return found

    def bytes_kept(self) -> int:
        """Bytes that a replica keeps at most, with the sums of a step that it records."""
        sums = sum(
            s.size**2 if s.kind == "matrix" else s.factor_size
            for x in self.layers
            for s in (x.a, x.g)
        )
        return FLOAT_BYTES * (self.factor_size + self.eigen_size + sums)


def upper(size: int) -> Array:
    """bool[size, size]: the upper triangle with the diagonal."""
    return np.triu(np.ones((size, size), np.bool_))


def side_of(size: int, max_dim: int) -> Side:
    return Side(size, "matrix" if size <= max_dim else "identity")


def at_most(layout: Layout, max_dim: int, skip: Sequence[str] = ()) -> tuple[LayerSides, ...]:
    """The layers that a model of this layout may have: every matrix, and every kernel of four
    dimensions, with the bias beside it. Which modules they belong to is not known: an embedding
    looks like a linear layer without a bias.
    """
    entries = [entry for entry, _, _ in layout.slices(TRAINED)]
    names = {entry.name for entry in entries}
    found = []
    for entry in entries:
        path, _, key = entry.name.rpartition(".")
        is_skipped = any(fnmatchcase(path, pattern) for pattern in skip)
        if key != "weight" or len(entry.shape) not in (2, 4) or is_skipped:
            continue
        rows = entry.shape[0]
        columns = entry.size // max(1, rows) + (f"{path}.bias" in names)
        found.append(LayerSides(path, side_of(columns, max_dim), side_of(rows, max_dim)))
    return tuple(found)


# ---------------------------------------------------------------- owners


def assigned(costs: Array, slots: Sequence[int], *, whole: bool) -> Array:
    """int64[layers, 2]: the slot that owns each side. The most expensive ones first, each to the
    member with the least so far. whole: both sides of a layer have one owner; so it is, too, unless
    there are more members than layers.
    """
    owners = np.full(costs.shape, -1, np.int64)
    return _filled(owners, costs, slots, whole=whole or len(slots) <= len(costs))


def reassigned(
    owners: Array, given: Array, costs: Array, slots: Sequence[int], *, whole: bool
) -> Array:
    """The owners once some have not given what they own, float32[layers, 2] of marks: those that
    have keep theirs.
    """
    kept = (given == 1) & np.isin(owners, slots)
    if whole:
        kept[:] = kept.all(axis=1, keepdims=True)
    return _filled(np.where(kept, owners, -1), costs, slots, whole=whole)


def _filled(owners: Array, costs: Array, slots: Sequence[int], *, whole: bool) -> Array:
    """Owners for all that has none, -1."""
    owners = owners.copy()
    loads = {slot: float(costs[owners == slot].sum()) for slot in slots}
    free = owners < 0
    if whole:
        units = [(n, slice(None)) for n in range(len(costs)) if free[n].all()]
    else:
        units = [
            (int(n), slice(int(side), int(side) + 1))
            for n, side in zip(*np.nonzero(free), strict=True)
        ]
    for unit in sorted(units, key=lambda unit: -float(costs[unit].sum())):
        slot = min(slots, key=lambda slot: (loads[slot], slot))
        owners[unit] = slot
        # Where nothing is decomposed, layers are spread by their number.
        loads[slot] += float(costs[unit].sum()) or 1.0
    return owners
