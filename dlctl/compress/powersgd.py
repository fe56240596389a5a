"""A slice as a matrix, of which only two thin factors are sent.

PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019), rank r, one step of power iteration per push
that starts where the last one ended:

    P = M Q,   P = orthogonalise(P),   Q = M^T P,   sent: P, Q,   rebuilt: P Q^T

with error feedback. The paper does this for the matrix of every layer and averages P and Q over all
workers; here each worker's push is independent, and M is the server's slice of the flat vector, in
rows of n = ceil(sqrt(d)) elements. Such rows are not those of a layer, so M is less close to a
matrix of low rank than a layer's gradient often is: expect more error at the same rank.
For every u, with the rebuilt matrix a projection of M,

    ||u - Q(u)||^2 <= ||u||^2

A step starts with columns of length 1 instead of the sent columns, which are as long as M: the
directions are the same, and the squares of a very long or short P neither overflow nor underflow.
The product is computed element by element in a fixed order and not by a matrix routine, so that it
is bit-identical on server and worker on any machine; u minus it is rounded to the precision of u.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from dlctl.compress.base import Compressor, Delta, rng_of
from dlctl.compress.plain import (
    DENSE_BELOW,
    Least,
    check_array,
    expand_plain,
    is_plain,
    take_plain,
    take_whole,
)
from dlctl.compress.values import arrays_of
from dlctl.errors import RemoteProtocolError
from dlctl.job.config import STRICT
from dlctl.model.vector import Vector, cast, host_view, matrix_like, to_host
from dlctl.wire.messages import Array, Packed

RANK_MAX = 64
CHUNK_ELEMENTS = 2**16
VANISHED = 1e-6
"""A column that loses so much of its length is a linear combination of the columns before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGDOptions:
    __pydantic_config__ = STRICT

    rank: Annotated[int, Ge(1), Le(RANK_MAX)] = 2
    """Columns of the two factors. A push of a slice of d elements carries about 2 * rank * sqrt(d)
    values."""
    dense_below: Least = DENSE_BELOW
    """A server's slice with fewer elements than this is sent uncompressed."""


class PowerSGD(Compressor):
    """Arrays on the wire: rank uint8[1], P float32[m r] and Q float32[n r], row by row; or a plain
    form (`plain.py`).

    A slice that is not larger than its factors is sent uncompressed.
    """

    Options: ClassVar[type[Any]] = PowerSGDOptions

    def __init__(self, options: PowerSGDOptions) -> None:
        self.options = options
        self._warm: dict[tuple[int, int], Array] = {}
        """(shard, its size) -> Q of its last nonzero push, float32[n, r]: unit columns."""
        self.reseed(0)

    def reseed(self, *numbers: int) -> None:
        """Seeds the first Q of every shard."""
        self._random = rng_of(numbers)

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take the product of the two factors out of `u`."""
        plain = take_plain("powersgd", u, self.options.dense_below)
        if plain is not None:
            return plain
        u = host_view(u)
        height, width = shape(len(u))
        rank = self.options.rank
        if rank * (height + width) >= len(u):
            return take_whole("powersgd", u)
        P, Q = self._factors(u, shard, width)
        for lo, product in products(P, Q, len(u)):
            u[lo : lo + len(product)] -= product
        left, right = to_host(P).reshape(-1), to_host(Q).reshape(-1)
        return Packed("powersgd", len(u), (np.array([rank], np.uint8), left, right))

    def _factors(self, u: Vector, shard: int, width: int) -> tuple[Vector, Vector]:
        """P float32[m, r] of orthonormal columns and Q float32[n, r], where `u` is."""
        key = (shard, len(u))
        start = self._warm.get(key)
        if start is None:
            start = self._fresh(width, self.options.rank)
        whole = len(u) // width * width
        body, tail = u[:whole].reshape(-1, width), u[whole:].reshape(1, -1)
        Q = matrix_like(u, start)
        P = matrix_like(u, np.zeros((shape(len(u))[0], Q.shape[1]), np.float32))
        P[: len(body)] = body @ Q
        if tail.shape[1]:
            P[-1:] = tail @ Q[: tail.shape[1]]
        orthogonalise(P)
        P = cast(P, "float32")
        wide = matrix_like(u, P)
        Q = body.T @ wide[: len(body)]
        if tail.shape[1]:
            Q[: tail.shape[1]] += tail.T @ wide[-1:]
        Q = cast(Q, "float32")
        found = to_host(Q)
        if found.any():  # An empty push has no information for the next one.
            self._warm[key] = self._refreshed(found)
        return P, Q

    def _refreshed(self, Q: Array) -> Array:
        """Q for the next push: a column of zeros would stay zero for ever."""
        start, gone = Q.copy(), ~Q.any(0)
        if gone.any():
            start[:, gone] = self._fresh(len(Q), int(gone.sum()))
        return unit_columns(start)

    def _fresh(self, height: int, width: int) -> Array:
        return unit_columns(self._random.standard_normal((height, width), dtype=np.float32))

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """Decode a push to a dense delta."""
        if is_plain(packed):
            return expand_plain(packed, size)
        ranks, left, right = arrays_of(packed, size, 3)
        check_array(ranks, "u1", 1, "ranks")
        height, width = shape(size)
        rank = int(ranks[0])
        if not 1 <= rank <= RANK_MAX:
            raise RemoteProtocolError(f"factors of rank {rank}; it is 1 to {RANK_MAX}")
        if rank * (height + width) >= size:
            raise RemoteProtocolError(f"factors of rank {rank} are larger than a shard of {size}")
        check_array(left, "<f4", height * rank, "elements of P")
        check_array(right, "<f4", width * rank, "elements of Q")
        values = np.empty(size, np.float32)
        P, Q = left.reshape(height, rank), right.reshape(width, rank)
        with np.errstate(over="ignore", invalid="ignore"):  # of a hostile sender
            for lo, product in products(P, Q, size):
                values[lo : lo + product.size] = product
        return Delta(values)


def shape(size: int) -> tuple[int, int]:
    """(rows, elements of a row) of a slice; the last row may be shorter."""
    width = isqrt(size - 1) + 1 if size else 0
    return (-(-size // width) if size else 0), width


def products(P: Vector, Q: Vector, size: int) -> Iterator[tuple[int, Vector]]:
    """(where it begins, float32[...]): the elements of P Q^T, row by row, `size` in all."""
    width = len(Q)
    step = max(1, CHUNK_ELEMENTS // width) if isinstance(P, np.ndarray) else len(P)
    for first in range(0, len(P), step):
        rows = P[first : first + step]
        product = rows[:, :1] * Q[:, 0]
        for i in range(1, Q.shape[1]):
            product += rows[:, i : i + 1] * Q[:, i]
        lo = first * width
        yield lo, product.reshape(-1)[: size - lo]


def unit_columns(Q: Array) -> Array:
    """float32[n, r]: Q with columns of length 1. None of them is zero."""
    lengths = np.linalg.norm(Q.astype(np.float64), axis=0)  # float32 has no square of 1e-25
    scaled: Array = (Q / lengths).astype(np.float32)
    return scaled


def orthogonalise(P: Vector) -> None:
    """Make the columns of P [m, r] orthonormal, in place: Gram-Schmidt, twice for precision.

    A column that is linearly dependent on those before it becomes zero.
    """
    for i in range(P.shape[1]):
        column = P[:, i]
        before = float(column @ column) ** 0.5
        for _ in range(2):
            for j in range(i):
                column -= P[:, j] * (P[:, j] @ column)
        length = float(column @ column) ** 0.5
        column *= 1 / length if length > VANISHED * before else 0.0
