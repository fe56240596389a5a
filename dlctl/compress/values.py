"""The values of a push: out of the vector in the precision of the wire, and back to float32.

What the rounding took away stays in the vector, exactly: the difference of a number and its
rounding to a shorter format always fits into the longer one.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from dlctl.errors import RemoteProtocolError
from dlctl.messages import Array, Packed
from dlctl.vector import Vector, cast, copy_into, to_host

Precision = Literal["float32", "float16"]

WIRE_DTYPES = (np.dtype("<f4"), np.dtype("<f2"))


def take_values(u: Vector, precision: Precision) -> Array:
    """Take as much of every element of `u` (float32 or float64 [n]) as `precision` can express.

    Returns an array [n] on the host that shares no memory with `u`; in `u` stays the rest of each
    element, to the last bit. What is too large for the precision saturates at its largest number
    (float16: 65504). NaN and infinities are taken as they are and leave 0.
    """
    taken = cast(u, precision)
    on_host = to_host(taken)
    if taken.dtype == u.dtype:
        u[:] = 0
    elif np.isfinite(on_host).all():
        u -= taken
    else:
        before = to_host(u)
        _saturate(on_host, before)
        with np.errstate(invalid="ignore"):
            rest = before - on_host
        copy_into(u, np.where(np.isfinite(before), rest, 0))
    return on_host


def _saturate(rounded: Array, exact: Array) -> None:
    """Replace the infinities in `rounded` whose `exact` value is finite, in place.

    By the largest number of the format that is a multiple of the last bit of the exact value:
    otherwise the difference would not be exact. It is 0 for a value so large (1.1e12 for float32
    taken as float16) that nothing of the format's range shows in it.
    """
    over = np.flatnonzero(np.isinf(rounded) & np.isfinite(exact))
    _, exponent = np.frexp(exact[over])
    last_bit = np.ldexp(1.0, exponent - 1 - np.finfo(exact.dtype).nmant)
    limit = float(np.finfo(rounded.dtype).max)
    rounded[over] = np.copysign(np.floor(limit / last_bit) * last_bit, exact[over])


def arrays_of(packed: Packed, size: int, count: int) -> tuple[Array, ...]:
    """The `count` arrays of a push for a shard of `size` elements; the first one is its values.

    Raises RemoteProtocolError if the push is for a shard of another size, has more or fewer arrays,
    or has values that are neither float32 nor float16.
    """
    if packed.length != size:
        raise RemoteProtocolError(f"a push for {packed.length} elements; this shard has {size}")
    if len(packed.arrays) != count:
        raise RemoteProtocolError(f'"{packed.kind}" has {count} arrays, not {len(packed.arrays)}')
    values = packed.arrays[0]
    if values.ndim != 1 or values.dtype not in WIRE_DTYPES:
        raise RemoteProtocolError(f"a push has float32 or float16 values, not {values.dtype}")
    return packed.arrays


def as_float32(values: Array) -> Array:
    """float32[n]: the array itself, perhaps read-only, or a copy if it was float16."""
    if values.dtype == np.float32:
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.astype(np.float32)
