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

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from dlctl.errors import RemoteProtocolError
from dlctl.messages import Array

LOW_BITS_MAX = 56
"""With up to 7 bits before them they are in one word."""


def pack(indices: Array, size: int) -> Array:
    """uint8[packed_bytes(n, size)] of `indices`: int64[n], strictly increasing, in [0, size)."""
    count = indices.size
    if count == 0:
        return np.empty(0, np.uint8)
    low_bits = _low_bits(count, size)
    if low_bits == 0:
        return _mask(indices, size)
    highs = indices >> low_bits
    highs += np.arange(count)
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
    indices = _ones(packed[cut:], count, _high_bits(count, size, low_bits))
    indices -= np.arange(count)
    indices <<= low_bits
    indices |= _unpack_low(packed[:cut], count, low_bits)
    if indices[-1] >= size or np.any(indices[1:] <= indices[:-1]):
        raise RemoteProtocolError("positions are not strictly increasing within the shard")
    return indices


def packed_bytes(count: int, size: int) -> int:
    """Bytes that `count` positions in a shard of `size` elements take, whichever they are."""
    return _length(count, size, _low_bits(count, size)) if count else 0


@lru_cache(maxsize=256)
def _low_bits(count: int, size: int) -> int:
    """b for the shortest result; 0: a plain bitmask."""
    return min(
        range(min(size.bit_length(), LOW_BITS_MAX) + 1), key=lambda b: _length(count, size, b)
    )


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
    count = indices.size
    low = np.zeros((-(-count // 8), 8), np.int64)
    np.bitwise_and(indices, (1 << low_bits) - 1, out=low.reshape(-1)[:count])
    # Rows are longer than what they hold, so that a whole word can be written at every byte of it.
    rows = np.zeros((len(low), low_bits + 8), np.uint8)
    for lane, (words, shift) in enumerate(_lanes(rows, len(rows), low_bits)):
        words |= low[:, lane].view(np.uint64) << shift
    return rows[:, :low_bits].reshape(-1)[: _bytes(count * low_bits)]


def _unpack_low(packed: Array, count: int, low_bits: int) -> Array:
    low = np.empty((-(-count // 8), 8), np.int64)
    octets = np.zeros(len(low) * low_bits + 8, np.uint8)
    octets[: packed.size] = packed
    for lane, (words, shift) in enumerate(_lanes(octets, len(low), low_bits)):
        low[:, lane] = (words >> shift) & np.uint64((1 << low_bits) - 1)
    return low.reshape(-1)[:count]


def _lanes(octets: Array, count: int, low_bits: int) -> Iterator[tuple[Array, np.uint64]]:
    """Eight numbers of `low_bits` bits take just `low_bits` bytes, so that the first ones of all
    `count` eights begin at the same bit of a byte, and so do all second ones, and so on. For each
    of the eight: the words that they are in, and the bit at which they begin.
    """
    stride = octets.strides[0] if octets.ndim == 2 else low_bits
    for lane in range(8):
        start, shift = divmod(lane * low_bits, 8)
        yield np.ndarray(count, "<u8", octets, start, (stride,)), np.uint64(shift)
