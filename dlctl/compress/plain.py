"""The plain forms of a push, which every compressor may use and expand:

    whole:   (values [d],)                            all elements
    chosen:  (values [n], positions uint8[...])       n elements, packed by `indices.py`

A replica that is cut over several processes sends what each of them has taken of its part, in
whatever form, one after the other:

    parts:   (outline int64[2 parts], arrays ...)     elements and number of arrays of each part

Whole goes a slice that is too small to be worth more thought, and one whose norm is so large that
the sums of a compressor would overflow. Of a vector with NaN or infinities these alone are sent, as
chosen elements: the server sees them and refuses the push, and everything else waits for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from dlctl.model.vector import Vector, euclidean_norm, host_view, not_finite, to_host
from dlctl.wire.messages import Array, Packed

DENSE_BELOW = 1024
"""The usual least number of elements that are worth compressing."""
Least = Annotated[int, Ge(0), Le(2**30)]
NORM_MAX = 1e18
"""Up to this norm no sum or product that a compressor forms can overflow in float32. No server
takes a push as large as that: see `finite.PushNorm`."""


def take_plain(kind: str, u: Vector, dense_below: int) -> Packed | None:
    """The push of a vector that is not compressed, or None; one pass."""
    if len(u) < max(dense_below, 2):
        return take_whole(kind, u)
    if euclidean_norm(u) <= NORM_MAX:
        return None
    poison = not_finite(u)
    return take_chosen(kind, u, poison, "float32") if len(poison) else take_whole(kind, u)


def take_whole(kind: str, u: Vector) -> Packed:
    """All of `u` as float32; what float32 cannot express of float64 stays in `u`."""
    return Packed(kind, len(u), (take_values(u, "float32"),))


def take_chosen(
    kind: str, u: Vector, where: Vector, precision: Precision, picked: Vector | None = None
) -> Packed:
    """The elements at `where` (ascending int64[n], where `u` is); their rounding errors stay.
    Elements that are zero on the wire are not sent.

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


def joined(parts: Sequence[Packed]) -> Packed:
    """One push of the pushes of consecutive parts; at least one."""
    if len(parts) == 1:
        return parts[0]
    outline = np.array([[part.length, len(part.arrays)] for part in parts], np.int64).ravel()
    arrays = [array for part in parts for array in part.arrays]
    return Packed(parts[0].kind, sum(part.length for part in parts), (outline, *arrays))


def _parts(packed: Packed, size: int) -> list[Packed]:
    """The parts of a push. Raises RemoteProtocolError for what `joined` does not make."""
    arrays = list(packed.arrays[1:])
    outline = packed.arrays[0][: 2 * len(arrays) + 1].tolist()  # A part has an array at least.
    lengths, counts = outline[::2], outline[1::2]
    if len(lengths) != len(counts) or min(outline, default=0) < 1 or sum(lengths) != size:
        raise RemoteProtocolError(f"parts that are not {size} elements together")
    if sum(counts) != len(arrays):
        raise RemoteProtocolError(f"{len(arrays)} arrays of parts that have {sum(counts)}")
    return [
        Packed(packed.kind, length, tuple(arrays.pop(0) for _ in range(count)))
        for length, count in zip(lengths, counts, strict=True)
    ]


def expand(compressor: type[Compressor], packed: Packed, size: int) -> Delta:
    """Expand a push of any compressor. Raises as `Compressor.expand` does. If one part is dense,
    all become dense.
    """
    if not packed.arrays or packed.arrays[0].dtype != np.int64:
        return _expand_one(compressor, packed, size)
    parts = _parts(packed, size)
    deltas = [_expand_one(compressor, part, part.length) for part in parts]
    begins = np.cumsum([0, *(part.length for part in parts[:-1])])
    if any(delta.indices is None for delta in deltas):
        values = np.zeros(size, np.float32)
        for delta, begin, part in zip(deltas, begins, parts, strict=True):
            here = values[begin : begin + part.length]
            here[slice(None) if delta.indices is None else delta.indices] = delta.values
        return Delta(values)
    places = [d.indices + at for d, at in zip(deltas, begins, strict=True) if d.indices is not None]
    return Delta(np.concatenate([delta.values for delta in deltas]), np.concatenate(places))


def _expand_one(compressor: type[Compressor], packed: Packed, size: int) -> Delta:
    if len(packed.arrays) == 2 and not any(array.size for array in packed.arrays):
        return Delta(np.empty(0, np.float32), np.empty(0, np.int64))
    return compressor.expand(packed, size)


def is_plain(packed: Packed) -> bool:
    """Whether a push has the structure of a plain form; a compressor's own form must differ."""
    if len(packed.arrays) == 2:
        values, positions = packed.arrays
        return values.dtype != np.uint8 and positions.dtype == np.uint8
    return len(packed.arrays) == 1


def expand_plain(packed: Packed, size: int) -> Delta:
    """Decode a plain push. Raises RemoteProtocolError for one that neither `take_whole` nor
    `take_chosen` would have made, before anything is allocated.
    """
    return expand_whole(packed, size) if len(packed.arrays) == 1 else expand_chosen(packed, size)


def expand_whole(packed: Packed, size: int) -> Delta:
    (values,) = arrays_of(packed, size, 1)
    check_values(values)
    check_length(values, size, "values")
    return Delta(as_float32(values))


def whole_values(packed: Packed) -> Array | None:
    """The values of a push of all elements that needs no expanding, float32[n]; None for others.
    They may not have been received yet: nothing is read.
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
