"""The values of a push: taken out of the vector in the wire's precision, and back to float32.

Rounding errors stay in the vector, exactly: the difference of a number and its rounding to a
shorter format always fits into the longer one. On the wire float32 and float16 are unchanged;
bfloat16, which numpy does not have, is the upper half of a float32, as uint16.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from dlctl import kernels
from dlctl.compress import bfloat16
from dlctl.errors import RemoteProtocolError
from dlctl.model.vector import Vector, cast, copy_into, host_view, to_host
from dlctl.util import threads
from dlctl.util.buffer_pool import BufferPool
from dlctl.util.threads import BLOCK, PART
from dlctl.wire.messages import Array, Packed

Precision = Literal["float32", "float16", "bfloat16"]

MEMORY = BufferPool(free_max=1)
"""Memory for the values of large pushes. A process that makes them calls its `check` once a second.
"""
WIRE_DTYPES = (np.dtype("<f4"), np.dtype("<f2"), np.dtype("<u2"))
LARGEST: dict[Precision, float] = {
    "float32": 3.4028234663852886e38,
    "float16": 65504.0,
    "bfloat16": 255 * 2.0**120,
}


def take_values(u: Vector, precision: Precision) -> Array:
    """Take as much of every element of `u` (float32 or float64 [n]) as `precision` can express.

    Returns an array [n] on the host that shares no memory with `u`; the exact rest of each element
    stays in `u`. Values too large for the precision saturate at its largest number (float16:
    65504). NaN and infinities are taken unchanged and leave 0.
    """
    if isinstance(u, np.ndarray) and u.dtype == precision:
        return _take_all(u)
    if (taken := _take_in_c(u, precision)) is not None:
        return taken
    if precision == "bfloat16":
        return _take_bfloat16(u)
    rounded = cast(u, precision)
    on_host = to_host(rounded)
    if rounded.dtype == u.dtype:
        u[:] = 0
    elif np.isfinite(on_host).all():
        u -= rounded
    else:
        _take_saturated(u, on_host, precision)
    return on_host


def _take_all(u: Array) -> Array:
    """A copy of `u`, which is set to zeros; each part while it is in the processor's cache."""
    taken = MEMORY.take(u.nbytes).view(u.dtype) if u.size >= PART else np.empty_like(u)

    def take(lo: int, hi: int) -> None:
        for at in range(lo, hi, BLOCK):
            cut = slice(at, min(at + BLOCK, hi))
            taken[cut] = u[cut]
            u[cut] = 0

    threads.in_parts(u.size, take)
    return taken


def _take_in_c(u: Vector, precision: Precision) -> Array | None:
    """None, and `u` is unchanged: there is no loop for it, or some values are too large."""
    is_bfloat = precision == "bfloat16"
    loops = kernels.halves("bfloat" if is_bfloat else "half")
    if loops is None or not kernels.takes(u) or u.dtype != np.float32:
        return None
    taken = np.empty(u.size, "<u2" if is_bfloat else np.float16)
    if any(threads.in_parts(u.size, lambda lo, hi: loops.narrow(u[lo:hi], taken[lo:hi]))):
        return None
    threads.in_parts(u.size, lambda lo, hi: loops.rest(taken[lo:hi], u[lo:hi]))
    return taken


def _take_bfloat16(u: Vector) -> Array:
    """uint16[n]: bfloat16 values, made by whole-array operations on the bits, on a GPU by torch."""
    here = host_view(u)
    if isinstance(here, np.ndarray):
        on_host = bfloat16.encode(here)
        taken = bfloat16.decode(on_host)
    else:
        taken = u.bfloat16()
        on_host = bfloat16.bits_of(taken)
    if bfloat16.all_finite(on_host):
        here -= taken
        return on_host
    wide = bfloat16.decode(on_host)
    _take_saturated(u, wide, "bfloat16")
    return bfloat16.encode(wide)


def _take_saturated(u: Vector, rounded: Array, precision: Precision) -> None:
    """Subtract `rounded` from `u`, with elements that are not finite or too large; changes
    `rounded`."""
    before = to_host(u)
    _saturate(rounded, before, LARGEST[precision])
    with np.errstate(invalid="ignore"):
        rest = before - rounded
    copy_into(u, np.where(np.isfinite(before), rest, 0))


def _saturate(rounded: Array, exact: Array, limit: float) -> None:
    """Replace the infinities in `rounded` whose `exact` value is finite, in place.

    By the largest number of the format that is a multiple of the last bit of the exact value:
    otherwise the difference would not be exact. It is 0 for a value so large (1.1e12 for float32
    taken as float16) that nothing of the format's range shows in it.
    """
    over = np.flatnonzero(np.isinf(rounded) & np.isfinite(exact))
    _, exponent = np.frexp(exact[over])
    last_bit = np.ldexp(1.0, exponent - 1 - np.finfo(exact.dtype).nmant)
    rounded[over] = np.copysign(np.floor(limit / last_bit) * last_bit, exact[over])


def arrays_of(packed: Packed, size: int, count: int) -> tuple[Array, ...]:
    """The `count` arrays of a push for a shard of `size` elements.

    Raises RemoteProtocolError if the push is for a shard of another size, or has more or fewer
    arrays.
    """
    if packed.length != size:
        raise RemoteProtocolError(f"a push for {packed.length} elements; this shard has {size}")
    if len(packed.arrays) != count:
        raise RemoteProtocolError(f'"{packed.kind}" has {count} arrays, not {len(packed.arrays)}')
    return packed.arrays


def check_values(values: Array) -> None:
    """Raises RemoteProtocolError unless these are values as `take_values` makes them."""
    if values.ndim != 1 or values.dtype not in WIRE_DTYPES:
        raise RemoteProtocolError(f"a push has values of 32 or 16 bits, not {values.dtype}")


def as_float32(values: Array) -> Array:
    """float32[n]: the array itself, perhaps read-only, or a copy if it had 16 bits."""
    if values.dtype == np.float32:
        return values
    is_bfloat = values.dtype == np.uint16
    loops = kernels.halves("bfloat" if is_bfloat else "half")
    if loops is not None and values.dtype in WIRE_DTYPES and kernels.takes(values):
        wide = np.empty(values.shape, np.float32)
        threads.in_parts(values.size, lambda lo, hi: loops.widen(values[lo:hi], wide[lo:hi]))
        return wide
    if is_bfloat:
        return bfloat16.decode(values)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.astype(np.float32)
