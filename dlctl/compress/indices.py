"""Sorted positions in few bytes: about 1.07 each at 1 % density, 1.5 at 0.1 %, 0.7 at 10 %.

A bitmask costs one bit per element of the shard, which is good from a density of about 25 % on.
Below that, each index is cut in two (Elias 1974, Fano 1971). Its lowest b bits are written as they
are. What is left, the high part, grows slowly from one index to the next, so only its gaps are
written, in unary: the high parts h_0 <= h_1 <= ... become a bitmask in which bit h_i + i is set:

    indices 3 4 7 13 with b = 2:   low parts 3 0 3 1,   high parts 0 1 1 3   ->   bits 0 2 3 6

Both are done by whole-array operations. The number of indices and the size of the shard decide b,
and thereby the exact number of bytes. So a decoder need not be told b, and it refuses a wrong
length before it allocates anything; what it allocates then is proportional to the bytes it got.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dlctl.errors import RemoteProtocolError
from dlctl.messages import Array


def pack(indices: Array, size: int) -> Array:
    """uint8[packed_bytes(n, size)] of `indices`: int64[n], strictly increasing, in [0, size)."""
    count = indices.size
    if count == 0:
        return np.empty(0, np.uint8)
    low_bits = _low_bits(count, size)
    if low_bits == 0:
        return _mask(indices, size)
    highs = (indices >> low_bits) + np.arange(count)
    return np.concatenate(
        [_pack_low(indices, low_bits), _mask(highs, _high_bits(count, size, low_bits))]
    )


def unpack(packed: Array, count: int, size: int) -> Array:
    """The `count` indices, int64[count], strictly increasing, in [0, size).

    Raises RemoteProtocolError for anything that `pack` would not have made of `count` such indices.
    """
    if packed.ndim != 1 or packed.dtype != np.uint8:
        raise RemoteProtocolError(f"positions are bytes, not {packed.dtype}")
    if count > size:
        raise RemoteProtocolError(f"{count} positions in a shard of {size} elements")
    expected = packed_bytes(count, size)
    if packed.size != expected:
        raise RemoteProtocolError(f"{count} positions in {packed.size} bytes; they take {expected}")
    if count == 0:
        return np.empty(0, np.int64)
    low_bits = _low_bits(count, size)
    if low_bits == 0:
        return _ones(packed, count, size)
    cut = _bytes(count * low_bits)
    highs = _ones(packed[cut:], count, _high_bits(count, size, low_bits)) - np.arange(count)
    indices = (highs << low_bits) | _unpack_low(packed[:cut], count, low_bits)
    if indices[-1] >= size or np.any(indices[1:] <= indices[:-1]):
        raise RemoteProtocolError("positions are not strictly increasing within the shard")
    return indices


def packed_bytes(count: int, size: int) -> int:
    """Bytes that `count` positions in a shard of `size` elements take, whichever they are."""
    return _length(count, size, _low_bits(count, size)) if count else 0


@lru_cache(maxsize=256)
def _low_bits(count: int, size: int) -> int:
    """b for the shortest result; 0: a plain bitmask."""
    return min(range(size.bit_length() + 1), key=lambda b: _length(count, size, b))


def _length(count: int, size: int, low_bits: int) -> int:
    if low_bits == 0:
        return _bytes(size)
    return _bytes(count * low_bits) + _bytes(_high_bits(count, size, low_bits))


def _high_bits(count: int, size: int, low_bits: int) -> int:
    """Length of the high parts' bitmask: the last index is at most size - 1."""
    return count + ((size - 1) >> low_bits)


def _bytes(bits: int) -> int:
    return (bits + 7) // 8


def _mask(positions: Array, bits: int) -> Array:
    """A bitmask of `bits` bits with those at `positions` set."""
    flags = np.zeros(bits, bool)
    flags[positions] = True
    return np.packbits(flags, bitorder="little")


def _ones(mask: Array, count: int, bits: int) -> Array:
    """Positions of the `count` bits that are set; RemoteProtocolError if it is another number."""
    positions = np.flatnonzero(np.unpackbits(mask, bitorder="little").view(bool))
    if positions.size != count or positions[-1] >= bits:
        raise RemoteProtocolError(f"positions mark {positions.size} elements; {count} values came")
    return positions


def _pack_low(indices: Array, low_bits: int) -> Array:
    """The lowest bits of each index, one after the other without gaps."""
    octets = np.ascontiguousarray(indices, "<i8").view(np.uint8).reshape(-1, 8)
    bits = np.unpackbits(octets[:, : _bytes(low_bits)], axis=1, count=low_bits, bitorder="little")
    return np.packbits(bits, bitorder="little")


def _unpack_low(packed: Array, count: int, low_bits: int) -> Array:
    bits = np.unpackbits(packed, count=count * low_bits, bitorder="little").reshape(count, low_bits)
    octets = np.zeros((count, 8), np.uint8)
    octets[:, : _bytes(low_bits)] = np.packbits(bits, axis=1, bitorder="little")
    return octets.view("<i8").reshape(count)
