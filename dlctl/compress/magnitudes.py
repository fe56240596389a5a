"""The magnitudes of a vector's elements: those above a threshold, and the largest ones.

Without the sign bit, floats are ordered as their bits are as integers, with infinity and NaN at the
top. On the host one comparison of the whole vector is therefore one pass over memory, in blocks
that stay in the cache: clear the sign bits, compare, list the few remaining positions and copy
their elements while they are cached. The two scratch buffers are reused. On a GPU torch does the
same with whole vectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dlctl.model.vector import Vector, host_view, to_host
from dlctl.wire.messages import Array

BLOCK = 2**18
"""Elements of a block. 2^16 to 2^18 were equally fast with 25 million float32, 2^14 was slower."""


class Found(NamedTuple):
    where: Vector
    """Ascending indices, int64[n], where `u` is."""
    values: Vector
    """The elements there, a copy."""


class Scratch:
    """Two buffers for one block, allocated on demand."""

    def __init__(self) -> None:
        self._bits = np.empty(0, np.int32)
        self._flags = np.empty(0, bool)

    def of(self, length: int, dtype: np.dtype) -> tuple[Array, Array]:
        if self._bits.size < length or self._bits.dtype != dtype:
            self._bits = np.empty(length, dtype)
            self._flags = np.empty(length, bool)
        return self._bits[:length], self._flags[:length]


class Magnitudes:
    """The magnitudes of one vector `u`, float32 or float64 [n], n > 0, which must not change."""

    def __init__(self, u: Vector, scratch: Scratch) -> None:
        self.u = host_view(u)
        self._scratch = scratch
        self._on_host = isinstance(self.u, np.ndarray)
        self._abs: Any = None if self._on_host else self.u.abs()

    def at_least(self, threshold: float) -> Found:
        """The elements of magnitude >= threshold >= 0, and every NaN."""
        if not self._on_host:
            return self._chosen(~(self._abs < threshold))
        bits = self._int_view()
        lowest = abs(bits.dtype.type(np.array(threshold, self.u.dtype).view(bits.dtype)))
        length = min(BLOCK, bits.size)
        cleared, flags = self._scratch.of(length, bits.dtype)
        where, values = [], []
        for lo in range(0, bits.size, length):
            block = bits[lo : lo + length]
            part, flag = cleared[: block.size], flags[: block.size]
            np.bitwise_and(block, np.iinfo(bits.dtype).max, out=part)
            np.greater_equal(part, lowest, out=flag)
            at = np.flatnonzero(flag)
            values.append(self.u[lo : lo + length].take(at))
            at += lo
            where.append(at)
        return Found(np.concatenate(where), np.concatenate(values))

    def _chosen(self, flags: Vector) -> Found:
        where = flags.nonzero().squeeze(1)
        return Found(where, self.u[where])

    def above(self, threshold: float) -> Found:
        """Elements with magnitudes > threshold, which is first rounded to the precision of `u`."""
        if not self._on_host:
            return self._chosen(~(self._abs <= threshold))
        kind = self.u.dtype.type
        return self.at_least(np.nextafter(kind(threshold), kind(np.inf)) if threshold >= 0 else 0.0)

    def sample(self, start: int, stride: int) -> Array:
        """Magnitudes of every stride-th element, on the host; NaN as infinity."""
        taken: Array = np.abs(to_host(self.u[start::stride]))
        taken[np.isnan(taken)] = np.inf
        return taken

    def smallest_positive(self) -> float:
        """A threshold that all nonzero elements reach."""
        return float(np.finfo(str(self.u.dtype).removeprefix("torch.")).smallest_subnormal)

    def _int_view(self) -> Array:
        bits: Array = self.u.view(f"i{self.u.itemsize}")
        return bits


def largest_of(found: Found, k: int) -> Found:
    """The k largest of these, ascending by position; NaN counts as largest. 1 <= k <= len(where).

    On the host the first elements of a tie are taken.
    """
    where, values = found
    if len(where) == k:
        return found
    if not isinstance(values, np.ndarray):
        kept = values.abs().topk(k, sorted=False).indices.sort().values
        return Found(where[kept], values[kept])
    order = _order(values)
    lowest = np.partition(order, order.size - k)[order.size - k]
    chosen = order > lowest
    tied = np.flatnonzero(order == lowest)[: k - np.count_nonzero(chosen)]
    chosen[tied] = True
    return Found(where[chosen], values[chosen])


def smallest_of(values: Vector) -> float:
    """The smallest magnitude of at least one element; NaN if all are NaN."""
    if not isinstance(values, np.ndarray):
        return float(values.abs().min())
    return float(_order(values).min().view(values.dtype))


def _order(values: Array) -> Array:
    """Integers [n] of the same order as the magnitudes."""
    bits = values.view(f"i{values.itemsize}")
    return bits & np.iinfo(bits.dtype).max
