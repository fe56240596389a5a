"""Sorted positions in few bytes: about 1.01 each at 1 % density, 1.43 at 0.1 %, 0.59 at 10 %.

The gaps are coded, the numbers of elements between one position and the next (Golomb, "Run-Length
Encodings", 1966), each split in two (Rice, "Some Practical Universal Noiseless Coding Techniques",
1979): its lowest b bits verbatim, the bits above them in unary, in one bitmask. A gap whose high
part is q skips q bits and sets the next one; the mask ends with the last set bit:

    positions 3 4 7 13 with b = 1:   gaps 3 0 2 5   ->   low parts  1 0 0 1
                                                         high parts 1 0 1 2   ->   bits 1 2 4 7

With b = 0, from a density of 38 % on, that is the bitmask of the positions themselves. If a set has
more than half of all elements, its complement is coded instead. Positions chosen at random take at
most 5 % more than the entropy of such sets, whatever their number, plus the last byte of each half;
all others stay below `packed_bytes_max`.

All work is done by whole-array operations. The number of positions and the size of the shard
determine b, and whether the complement is coded, so neither is sent. The decoder refuses an
impossible length before it allocates anything, and allocates in proportion to the received bytes
and values. A set has a single encoding: any other bytes are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from dlctl import kernels
from dlctl.errors import RemoteProtocolError
from dlctl.wire.messages import Array

LOW_BITS_MAX = 56
"""The most low bits of a position: with up to 7 bits before them they are in one word."""


def pack(indices: Array, size: int) -> Array:
    """uint8[at most packed_bytes_max(n, size)] of `indices`: int64[n], strictly increasing, in
    [0, size); a shard has at most 2^62 elements.
    """
    coded = _coded(indices.size, size)
    if coded == 0:
        return np.empty(0, np.uint8)
    if coded != indices.size:
        indices = _others(indices, size)
    low_bits = _low_bits(coded, size)
    if low_bits == 0:
        return _mask(indices)
    if (packed := _pack_in_c(indices, low_bits, size)) is not None:
        return packed
    # The first gap, and each other one plus 2^b: its high part is then the step from bit to bit.
    steps = np.empty(coded, np.int64)
    steps[0] = indices[0]
    np.subtract(indices[1:], indices[:-1], out=steps[1:])
    steps[1:] += (1 << low_bits) - 1
    low = _pack_low(steps, low_bits)
    steps >>= low_bits
    return np.concatenate([low, _mask(np.cumsum(steps, out=steps))])


def unpack(packed: Array, count: int, size: int) -> Array:
    """The `count` indices, int64[count], strictly increasing, in [0, size).

    Allocates in proportion to `count` and the bytes. No bytes at all may mean a whole shard: call
    this only if `count` values were received, too. Raises RemoteProtocolError for anything that
    `pack` would not have made of `count` such indices.
    """
    if packed.ndim != 1 or packed.dtype != np.uint8:
        raise RemoteProtocolError(f"positions are bytes, not {packed.dtype}")
    if count > size:
        raise RemoteProtocolError(f"{count} positions in a shard of {size} elements")
    coded = _coded(count, size)
    low_bits = _low_bits(coded, size)
    cut, most = _bytes(coded * low_bits), packed_bytes_max(count, size)
    if not cut + _bytes(coded) <= packed.size <= most:
        raise RemoteProtocolError(f"{count} positions in {packed.size} bytes; at most {most}")
    low, mask = packed[:cut], packed[cut:]
    found = _unpack_in_c(low, mask, coded, low_bits, size)
    if found is None:
        found = _positions(low, mask, coded, low_bits, size)
    return found if coded == count else _others(found, size)


def _pack_in_c(indices: Array, low_bits: int, size: int) -> Array | None:
    coded = indices.size
    cut = _bytes(coded * low_bits)
    room = np.zeros(cut + _bytes(coded + _high_max(coded, size, low_bits)), np.uint8)
    length = kernels.pack_positions(indices, low_bits, room[:cut], room[cut:])
    return None if length is None else room[: cut + _bytes(length)]


def _unpack_in_c(low: Array, mask: Array, coded: int, low_bits: int, size: int) -> Array | None:
    """None: not in C, or `_positions` says why not."""
    padding = 8 * low.size - coded * low_bits
    if not (coded and mask[-1]) or (padding and int(low[-1]) >> (8 - padding)):
        return None
    found = np.empty(coded, np.int64)
    return found if kernels.unpack_positions(found, low_bits, low, mask, size) else None


def packed_bytes_max(count: int, size: int) -> int:
    """Bytes that `count` positions in a shard of `size` elements take at most."""
    coded = _coded(count, size)
    low_bits = _low_bits(coded, size)
    return _bytes(coded * low_bits) + _bytes(coded + _high_max(coded, size, low_bits))


def _coded(count: int, size: int) -> int:
    """The number of positions that are coded: the given ones, or the missing ones."""
    return min(count, size - count)


def _others(indices: Array, size: int) -> Array:
    """The positions that are not among these."""
    flags = np.ones(size, bool)
    flags[indices] = False
    return np.flatnonzero(flags)


@lru_cache(maxsize=256)
def _low_bits(coded: int, size: int) -> int:
    """b for the shortest expected result, if all elements are coded with equal probability.

    That is coded * (b + 1 + Q / (1 - Q)) bits, Q = (1 - coded / size)^(2^b) being the chance that a
    gap is 2^b or more; with b + 1 it is less if Q^2 + Q > 1, and never again once it is not. Hence
    coded * 2^b < size, and no sum of a decoder exceeds twice the size.
    """
    if coded == 0:
        return 0
    # In fixed point with 128 binary places: equal on every machine, and none rounds to 1.
    one, low_bits = 1 << 128, 0
    q = one * (size - coded) // size
    while q * q + q * one > one * one and low_bits < LOW_BITS_MAX:
        q, low_bits = q * q // one, low_bits + 1
    return low_bits


def _high_max(coded: int, size: int, low_bits: int) -> int:
    """Upper bound of the sum of the high parts: the gaps are elements that are not coded."""
    return (size - coded) >> low_bits if coded else 0


def _bytes(bits: int) -> int:
    return (bits + 7) // 8


def _mask(positions: Array) -> Array:
    """A bitmask with the bits at `positions` set; the last of them is in its last byte."""
    flags = np.zeros(positions[-1] + 1, bool)
    flags[positions] = True
    return np.packbits(flags, bitorder="little")


def _ones(mask: Array, coded: int) -> Array:
    """Positions of the `coded` set bits; RemoteProtocolError if their number differs."""
    positions = np.flatnonzero(np.unpackbits(mask, bitorder="little").view(bool))
    if positions.size != coded:
        raise RemoteProtocolError(f"positions mark {positions.size} elements instead of {coded}")
    if coded and not mask[-1]:
        raise RemoteProtocolError("positions end in a byte without any")
    return positions


def _positions(low: Array, mask: Array, coded: int, low_bits: int, size: int) -> Array:
    """The output of `pack`, decoded: int64[coded]; RemoteProtocolError for anything else."""
    found = _ones(mask, coded)
    if coded == 0:
        return found
    if found[-1] - (coded - 1) > _high_max(coded, size, low_bits):
        raise RemoteProtocolError("positions have gaps that are wider than the shard")
    if low_bits:
        if int(low[-1]) >> (coded * low_bits - 8 * (low.size - 1)):
            raise RemoteProtocolError("positions have something behind their low parts")
        found <<= low_bits
        most = (1 << low_bits) - 1
        steps = np.subtract(_unpack_low(low, coded, low_bits), most, dtype=np.int64)
        steps[0] += most
        found += np.cumsum(steps, out=steps)
    if found[-1] >= size:
        raise RemoteProtocolError("positions are not within the shard")
    return found


def _pack_low(steps: Array, low_bits: int) -> Array:
    """The lowest bits of each of int64[n], concatenated without padding."""
    word = _word(low_bits)
    low = np.zeros((_eights(steps.size), 8), word)
    flat = low.reshape(-1)[: steps.size]
    np.bitwise_and(steps, (1 << low_bits) - 1, out=flat, casting="unsafe")
    # Rows are longer than their content, so that a whole word can be written at each of its bytes.
    rows = np.zeros((len(low), low_bits + word.itemsize), np.uint8)
    for lane, (words, shift) in enumerate(_lanes(rows, len(rows), low_bits)):
        words |= low[:, lane] << shift
    return rows[:, :low_bits].reshape(-1)[: _bytes(steps.size * low_bits)]


def _unpack_low(packed: Array, count: int, low_bits: int) -> Array:
    """Unsigned numbers [count], of the smallest type: memory access is half of the time."""
    word = _word(low_bits)
    low = np.empty((_eights(count), 8), word)
    octets = np.zeros(len(low) * low_bits + word.itemsize, np.uint8)
    octets[: packed.size] = packed
    for lane, (words, shift) in enumerate(_lanes(octets, len(low), low_bits)):
        np.right_shift(words, shift, out=low[:, lane])
    low &= word.type((1 << low_bits) - 1)
    return low.reshape(-1)[:count]


def _lanes(octets: Array, count: int, low_bits: int) -> Iterator[tuple[Array, np.unsignedinteger]]:
    """Eight numbers of `low_bits` bits take just `low_bits` bytes, so that the first ones of all
    `count` eights begin at the same bit of a byte, and so do all second ones, and so on. For each
    of the eight: the words that they are in, and the bit at which they begin.
    """
    word = _word(low_bits)
    stride = octets.strides[0] if octets.ndim == 2 else low_bits
    for lane in range(8):
        start, shift = divmod(lane * low_bits, 8)
        yield np.ndarray(count, word, octets, start, (stride,)), word.type(shift)


def _word(low_bits: int) -> np.dtype[np.unsignedinteger]:
    """The smallest word that so many bits fit into at any offset within a byte."""
    return np.dtype("<u2" if low_bits <= 9 else "<u4" if low_bits <= 25 else "<u8")


def _eights(count: int) -> int:
    return -(-count // 8)
