"""The 32 largest cosine coefficients of every block of 64 x 64 elements: DeMo's pushes.

Peng et al., "DeMo: Decoupled Momentum Optimization", 2024. A block X becomes C X C', C the matrix
of the orthonormal cosine transform (DCT-II); the largest of its entries are sent, and their inverse
transform is subtracted from u, so that all other frequencies wait for a later push. With 32 of
4,096 coefficients of a block a push is a hundredth of a dense one, and yet changes every element.

- A block is 4,096 elements of a server's slice, 64 in a row; in the authors' code it is a tile of a
  matrix, and of a vector 64 elements. The last block of a slice has the remaining whole rows; the
  rest is a separate row. They send the same fraction of their coefficients, rounded up.
- Both sides compute the inverse transform in float64, and round it: so both get the same float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from annotated_types import Ge, Le

from dlctl.compress import indices
from dlctl.compress.base import Compressor, Delta
from dlctl.compress.chunked import largest_of_rows
from dlctl.compress.plain import (
    DENSE_BELOW,
    Least,
    check_array,
    expand_plain,
    is_plain,
    take_plain,
)
from dlctl.compress.values import Precision, arrays_of, as_float32, check_values, take_values
from dlctl.errors import RemoteProtocolError
from dlctl.job.config import STRICT
from dlctl.model.vector import Vector, host_view, matrix_like, to_host
from dlctl.wire.messages import Array, Packed

SIDE_MAX = 256
OUTLINE = np.dtype("<u4")
"""The dtype of the side of a block, which is sent as bytes."""
GROUP = 2**20
"""Approximate number of elements transformed together, to limit temporary memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DCTOptions:
    __pydantic_config__ = STRICT

    side: Annotated[int, Ge(2), Le(SIDE_MAX)] = 64
    """Rows and columns of a block."""
    keep: Annotated[int, Ge(1), Le(SIDE_MAX**2)] = 32
    """Coefficients sent of each block; 32 of 64 x 64 are 0.78 %."""
    values: Precision = "float32"
    """Precision of the sent values. Rounding errors go into a later push."""
    dense_below: Least = DENSE_BELOW
    """A server's slice with fewer elements than this is sent uncompressed."""


class BlockRun(NamedTuple):
    """Consecutive blocks of one shape."""

    lo: int
    blocks: int
    rows: int
    columns: int

    @property
    def hi(self) -> int:
        return self.lo + self.blocks * self.rows * self.columns


class DCT(Compressor):
    """Arrays on the wire: the side of a block, as bytes; coefficients; their positions as
    `indices.py` packs them, block by block and row by row. Or a plain form (`plain.py`).
    """

    Options: ClassVar[type[Any]] = DCTOptions
    selects = True

    def __init__(self, options: DCTOptions) -> None:
        self.side = options.side
        self.keep = min(options.keep, options.side**2)
        self.values = options.values
        self.dense_below = options.dense_below

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take the inverse transform of the largest coefficients of each block."""
        plain = take_plain("dct", u, self.dense_below)
        if plain is not None:
            return plain
        here = host_view(u)
        found = [self._take(here[p.lo : p.hi], p) for p in pieces(len(u), self.side)]
        values = np.concatenate([values for values, _ in found])
        where = np.concatenate([where for _, where in found])
        outline = np.array([self.side], OUTLINE).view(np.uint8)
        return Packed("dct", len(u), (outline, values, indices.pack(where, len(u))))

    def _take(self, u: Vector, piece: BlockRun) -> tuple[Array, Array]:
        """(coefficients, their positions in the whole int64[n]); subtracts their inverse transform
        from `u`."""
        coefficients = _encoded(u, piece).reshape(piece.blocks, -1)
        keep = -(-self.keep * coefficients.shape[1] // self.side**2)
        where = largest_of_rows(coefficients, keep)
        values = take_values(coefficients.reshape(-1)[where], self.values)
        sent = values != 0
        values, where = values[sent], to_host(where)[sent]
        u -= matrix_like(u, _decoded(as_float32(values), where, piece))
        return values, where + piece.lo

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """Decode a push to a dense delta."""
        if is_plain(packed):
            return expand_plain(packed, size)
        outline, values, positions = arrays_of(packed, size, 3)
        check_values(values)
        check_array(outline, "u1", OUTLINE.itemsize, "bytes of a side")
        side = int(outline.view(OUTLINE)[0])
        if not 2 <= side <= SIDE_MAX:
            raise RemoteProtocolError(f"blocks of {side} x {side} elements")
        where = indices.unpack(positions, values.size, size)
        coefficients, whole = as_float32(values), np.empty(size, np.float32)
        for piece in pieces(size, side):
            first, end = np.searchsorted(where, (piece.lo, piece.hi))
            part = slice(first, end)
            whole[piece.lo : piece.hi] = _decoded(coefficients[part], where[part] - piece.lo, piece)
        return Delta(whole)


def pieces(size: int, side: int) -> Iterator[BlockRun]:
    """The pieces of a slice; all but the last two are of whole blocks."""
    block = side * side
    whole = size // block
    most = max(1, GROUP // block)
    for first in range(0, whole, most):
        yield BlockRun(first * block, min(most, whole - first), side, side)
    rest = whole * block
    rows = (size - rest) // side
    if rows:
        yield BlockRun(rest, 1, rows, side)
    rest += rows * side
    if rest < size:
        yield BlockRun(rest, 1, 1, size - rest)


@cache
def cosines(n: int) -> Array:
    """float64[n, n]: C x is the orthonormal DCT-II of x, and C' its inverse."""
    k, j = np.arange(n)[:, None], np.arange(n)
    found: Array = np.sqrt(2 / n) * np.cos(np.pi * k * (2 * j + 1) / (2 * n))
    found[0] /= np.sqrt(2)
    return found


def _encoded(u: Vector, piece: BlockRun) -> Vector:
    """[blocks, rows, columns], of the dtype of `u` and where it is."""
    left, right = (matrix_like(u, cosines(n)) for n in (piece.rows, piece.columns))
    return left @ u.reshape(piece.blocks, piece.rows, piece.columns) @ right.T


def _decoded(values: Array, where: Array, piece: BlockRun) -> Array:
    """The inverse transform of these coefficients of a piece, float32[its elements]."""
    coefficients = np.zeros((piece.blocks, piece.rows, piece.columns))
    coefficients.reshape(-1)[where] = values
    with np.errstate(over="ignore", invalid="ignore"):  # of a hostile sender
        elements = cosines(piece.rows).T @ coefficients @ cosines(piece.columns)
        found: Array = elements.reshape(-1).astype(np.float32)
    return found
