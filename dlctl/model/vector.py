"""Operations on flat vectors, for numpy arrays and torch tensors alike.

In-place arithmetic (`u += g`, `u -= a * g`, `u[i] = 0`) is the same for both and needs no function.
torch is never imported here: a tensor has its own methods.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import numpy as np

from dlctl import kernels
from dlctl.util import threads
from dlctl.util.threads import BLOCK, PLACES
from dlctl.wire.messages import Array, Json, Packed

Vector = Any
"""numpy.ndarray or torch.Tensor, 1-d, float."""


class Spread(np.ndarray[Any, np.dtype[Any]], ABC):
    """float32[n] of a replica that is split over several processes: each of them works on a part of
    it (`daemons/worker/ranks/spread_vectors.py`). All other numpy operations work as on any array.
    """

    @abstractmethod
    def empty(self, lo: int, hi: int) -> Spread:
        """Another vector for the elements [lo, hi) of this one: zeros."""

    @abstractmethod
    def squared_norm(self) -> float:
        """The sum of the squares of all elements (`squared_norm` below)."""

    @abstractmethod
    def packed(self, shard: int, settings: Json) -> Packed:
        """What the processes' compressors take out of their parts (`compress.plain.parts`).
        settings: the current values of the compressor's live settings.
        """


def to_host(u: Vector) -> Array:
    """A numpy array of the same values: the array itself, a view of a CPU tensor, or a copy."""
    return u if isinstance(u, np.ndarray) else u.detach().cpu().numpy()


def host_view(u: Vector) -> Vector:
    """`u` in host memory as a numpy array that shares it; a tensor elsewhere unchanged."""
    return u if isinstance(u, np.ndarray) or u.device.type != "cpu" else u.detach().numpy()


def zeros_like(u: Vector) -> Vector:
    if isinstance(u, Spread):
        return u.empty(0, len(u))
    return np.zeros_like(u) if isinstance(u, np.ndarray) else u.new_zeros(u.shape)


def copy_into(target: Vector, values: Array) -> None:
    """target[:] = values, from the host to wherever `target` is."""
    if isinstance(target, Spread):
        target[:] = values
    elif isinstance(target, np.ndarray):
        threads.copy(target, values)
    else:
        target.copy_(target.new_tensor(values))


def room_beside(u: Vector, lo: int, hi: int) -> Array:
    """float32[hi - lo] on the host, of any content, for the elements [lo, hi) of a model `u`."""
    is_within = isinstance(u, Spread) and hi <= len(u)
    return u.empty(lo, hi) if is_within else np.empty(hi - lo, np.float32)


def copy_of(u: Vector) -> Vector:
    return u.copy() if isinstance(u, np.ndarray) else u.clone()


def chosen(u: Array, where: Array) -> Array:
    """A copy of the elements at `where` (int64[n], each within `u`)."""
    # mode="clip": checking the bounds again would take one more copy.
    picked: Array = np.take(u, where, mode="clip")
    return picked


def put_into(target: Vector, where: Array, values: Array) -> None:
    """target[where] = values, from the host to wherever `target` is."""
    if isinstance(target, np.ndarray):
        target = target.view(np.ndarray)
        threads.in_parts(where.size, partial(_put_part, target, where, values), BLOCK)
    else:
        target[indices_like(target, where)] = target.new_tensor(values)


def _put_part(target: Array, where: Array, values: Array, lo: int, hi: int) -> None:
    """A processor writes to scattered places one by one, but reads many in parallel: so the next
    few are read before they are written to, which loads them into its cache.
    """
    for at in range(lo, hi, PLACES):
        cut = slice(at, min(at + PLACES, hi))
        places = where[cut]
        chosen(target, places)
        target[places] = values[cut]


def cast(u: Vector, precision: str) -> Vector:
    """A copy of `u` where `u` is, as "float32" or "float16"; larger values become infinite."""
    if isinstance(u, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):
            return u.astype(precision)
    copy = {"float32": u.float, "float16": u.half}[precision]()
    return copy.clone() if copy is u else copy


def largest(u: Vector, k: int) -> Vector:
    """Ascending indices (int64, where `u` is) of the k elements of largest magnitude, 1 <= k <= n.

    They may be fewer than k if all others are zero. NaN counts as largest. For torch, ties are
    broken arbitrarily; for numpy, the first elements of a tie are taken.
    """
    if isinstance(u, np.ndarray):
        return _largest_numpy(u, k)
    return u.abs().topk(k, sorted=False).indices.sort().values


def _largest_numpy(u: Array, k: int) -> Array:
    # Without the sign bit, floats are ordered as their bits are as integers, with NaN at the top.
    # Zeros are left out first: partition() is many times slower where most elements are equal.
    order = np.abs(u).view(f"i{u.itemsize}")
    candidates = order[order > 0]
    if candidates.size <= k:
        return np.flatnonzero(order)
    threshold = np.partition(candidates, candidates.size - k)[candidates.size - k]
    chosen = np.flatnonzero(order >= threshold)
    if chosen.size == k:
        return chosen
    tied = np.flatnonzero(order[chosen] == threshold)
    return np.delete(chosen, tied[k - chosen.size :])


def choose(condition: Vector, yes: Vector, no: Vector) -> Vector:
    """Element by element: `yes` where `condition` is, else `no`."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes.where(condition, no)


def indices_like(u: Vector, indices: Array) -> Vector:
    """int64[n] where `u` is."""
    if isinstance(u, np.ndarray):
        return indices
    return u.new_tensor(indices, dtype=u[:0].long().dtype)


def matrix_like(u: Vector, values: Vector) -> Vector:
    """`values` of any shape, an array or a tensor, where `u` is and of its dtype."""
    if isinstance(u, np.ndarray):
        return values.astype(u.dtype, copy=False)
    return u.new_tensor(values) if isinstance(values, np.ndarray) else values.to(u.dtype)


def column_like(u: Vector, values: Array) -> Vector:
    """`values` [n] as a column [n, 1] where `u` is and of its dtype."""
    return matrix_like(u, values)[:, None]


def floor(u: Vector) -> Vector:
    return np.floor(u) if isinstance(u, np.ndarray) else u.floor()


def not_finite(u: Vector) -> Vector:
    """Ascending indices (int64, where `u` is) of the elements that are NaN or infinite."""
    if isinstance(u, np.ndarray):
        return np.flatnonzero(~np.isfinite(u))
    return (~u.isfinite()).nonzero().squeeze(1)


def euclidean_norm(u: Vector) -> float:
    """The square root of u.u, in one pass; not finite if an element is not, or squares overflow."""
    return math.sqrt(squared_norm(u))


def all_finite(u: Array) -> bool:
    """Whether no element is NaN or infinite, however large their squares are; in blocks."""
    if (are_finite := kernels.are_finite(u)) is not None:
        return are_finite
    parts = (u[lo : lo + BLOCK] for lo in range(0, u.size, BLOCK))
    return all(bool(np.isfinite(part).all()) for part in parts)


def is_finite(u: Vector) -> bool:
    """Whether the norm is finite: no element is NaN or infinite, no square overflows. One pass."""
    return math.isfinite(squared_norm(u))


def is_shorter(u: Array, length: float, about: float | None = None) -> bool:
    """Whether `euclidean_norm(u)` is at most `length`; False if it is infinite or NaN.

    One pass, or none. about: the sum of the squares in float32, added up in any order; None: not
    known yet. Near the limit numpy decides, so the order does not.
    """
    length = min(length, sys.float_info.max)
    about = kernels.squares(u) if about is None else about
    # Far more than the rounding errors of sums of 2^16 numbers in float32.
    is_clear = about is not None and math.sqrt(about) <= 0.999 * length
    return is_clear or euclidean_norm(u) <= length


def squared_norm(u: Vector) -> float:
    """The sum of all squares. The parts of a long array are summed in the array's own precision,
    and their sums in float64: the total may be larger than that precision can express.
    """
    if not isinstance(u, np.ndarray):
        return float(u @ u)
    if isinstance(u, Spread):
        return u.squared_norm()
    return sum(threads.in_parts(len(u), partial(_squares_of_part, u)))


def squares_of_block(u: Array) -> float:
    """The sum of the squares of float32[n], n <= `BLOCK`, added up in any order."""
    squares = kernels.squares(u)
    return _squares_of_part(u, 0, u.size) if squares is None else squares


def _squares_of_part(u: Array, lo: int, hi: int) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        # For two vectors, dot() releases the GIL; @ does not.
        return float(np.dot(u[lo:hi], u[lo:hi]))
