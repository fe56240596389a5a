"""The two plain forms of a push, which every compressor may use and expand:

    whole:   (values [d],)                            all elements
    chosen:  (values [n], positions uint8[...])       n elements, as `indices.py` has them

Whole goes a slice that is too small to be worth more thought, and one whose norm is so large that
the sums of a compressor would overflow. Of a vector with NaN or infinities these alone are sent, as
chosen elements: the server sees them and refuses the push, and everything else waits for the next.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from dlctl.compress import indices
from dlctl.compress.base import Compressor, Delta
from dlctl.compress.values import (
    Precision,
    arrays_of,
    as_float32,
    check_values,
    take_values,
)
from dlctl.errors import RemoteProtocolError
from dlctl.messages import Array, Packed
from dlctl.vector import Vector, euclidean_norm, host_view, not_finite, to_host

DENSE_BELOW = 1024
"""The usual least number of elements that are worth compressing."""
Least = Annotated[int, Ge(0), Le(2**30)]
NORM_MAX = 1e18
"""Up to this norm no sum or product that a compressor forms can overflow in float32. No server
takes a push as large as that: see `finite.PushNorm`."""


def take_plain(kind: str, u: Vector, dense_below: int) -> Packed | None:
    """The push of a vector that is no matter for a compressor, or None; one pass."""
    if len(u) < max(dense_below, 2):
        return take_whole(kind, u)
    if euclidean_norm(u) <= NORM_MAX:
        return None
    poison = not_finite(u)
    return take_chosen(kind, u, poison, "float32") if len(poison) else take_whole(kind, u)


def take_whole(kind: str, u: Vector) -> Packed:
    """All of `u` as float32; what float32 cannot express of float64 stays."""
    return Packed(kind, len(u), (take_values(u, "float32"),))


def take_chosen(
    kind: str, u: Vector, where: Vector, precision: Precision, picked: Vector | None = None
) -> Packed:
    """The elements at `where` (ascending int64[n], where `u` is); in their places stays what the
    precision lost. Those that are zero on the wire are not sent.

    picked: a copy of these elements, which will be changed.
    """
    u, where = host_view(u), host_view(where)
    picked = u[where] if picked is None else picked
    values = take_values(picked, precision)
    u[where] = picked
    sent = values != 0
    positions = indices.pack(to_host(where)[sent], len(u))
    return Packed(kind, len(u), (values[sent], positions))


def nothing(kind: str, size: int) -> Packed:
    """The push of `size` elements that are all zero, the same with every compressor."""
    return Packed(kind, size, (np.empty(0, np.float32), np.empty(0, np.uint8)))


def expand(compressor: type[Compressor], packed: Packed, size: int) -> Delta:
    """What was pushed, with whatever compressor. Raises as `Compressor.expand` does."""
    if len(packed.arrays) == 2 and not any(array.size for array in packed.arrays):
        return Delta(np.empty(0, np.float32), np.empty(0, np.int64))
    return compressor.expand(packed, size)


def is_plain(packed: Packed) -> bool:
    """Whether a push has the outline of a plain form; a compressor's own form must not have it."""
    if len(packed.arrays) == 2:
        values, positions = packed.arrays
        return values.dtype != np.uint8 and positions.dtype == np.uint8
    return len(packed.arrays) == 1


def expand_plain(packed: Packed, size: int) -> Delta:
    """Raises RemoteProtocolError for what neither `take_whole` nor `take_chosen` would have made;
    before anything is allocated.
    """
    return expand_whole(packed, size) if len(packed.arrays) == 1 else expand_chosen(packed, size)


def expand_whole(packed: Packed, size: int) -> Delta:
    (values,) = arrays_of(packed, size, 1)
    check_values(values)
    check_length(values, size, "values")
    return Delta(as_float32(values))


def whole_values(packed: Packed) -> Array | None:
    """The values of a push of all elements that needs no expanding, float32[n]; None for others.
    They may not have come yet: nothing is read.
    """
    is_single = len(packed.arrays) == 1 and packed.arrays[0].dtype == np.float32
    return packed.arrays[0] if is_single else None


def expand_chosen(packed: Packed, size: int) -> Delta:
    values, positions = arrays_of(packed, size, 2)
    check_values(values)
    found = indices.unpack(positions, values.size, size)
    return Delta(as_float32(values), found, positions)


def check_array(array: Array, dtype: str, length: int, what: str) -> None:
    """Raises RemoteProtocolError unless an array is of this dtype and length."""
    if array.ndim != 1 or array.dtype != np.dtype(dtype):
        raise RemoteProtocolError(f"{what} are {np.dtype(dtype)}, not {array.dtype}")
    check_length(array, length, what)


def check_length(array: Array, length: int, what: str) -> None:
    if array.size != length:
        raise RemoteProtocolError(f"{array.size} {what} where the shard needs {length}")
