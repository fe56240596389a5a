"""Every element in 4 bits: a sign and one of seven powers of two, or 0, below those of its block.

The format E3M0 in which Streaming DiLoCo sends outer gradients (Douillard et al., 2025, section
2.4), with one scale for each block of 1,024: 2^E is the power of two nearest to its largest
element, and an element is sent as the nearest of

    0,  +-2^(E-6),  ...,  +-2^(E-1),  +-2^E

so its error is at most a third of it, or half of 2^(E-6). u minus the sent value is exact in
floating point: nothing is lost, and the residual is in the next push. A block of numbers below
2^-126 waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dlctl.compress import blocks
from dlctl.compress.base import Compressor, Delta
from dlctl.compress.plain import (
    DENSE_BELOW,
    Least,
    check_array,
    expand_plain,
    is_plain,
    take_plain,
)
from dlctl.compress.values import arrays_of
from dlctl.job.config import STRICT
from dlctl.model.vector import Vector, choose, column_like, to_host
from dlctl.wire.messages import Array, Packed

ZERO = 7
"""The code of 0; the others are the distance of the exponent from E. The sign bit is 8."""
LOWEST = -126
NONE = -1000
"""The exponent of elements sent as 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class E3M0Options:
    __pydantic_config__ = STRICT

    dense_below: Least = DENSE_BELOW
    """A server's slice with fewer elements than this is sent uncompressed."""


class E3M0(Compressor):
    """Arrays on the wire: two codes a byte uint8[ceil(d/2)], the first in the low bits, and 2^E as
    float32[ceil(d/1024)], 0 for a block of zeros; or a plain form (`plain.py`).
    """

    Options: ClassVar[type[Any]] = E3M0Options

    def __init__(self, options: E3M0Options) -> None:
        self.options = options

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take of every element of `u` the nearest power of two."""
        plain = take_plain("e3m0", u, self.options.dense_below)
        if plain is not None:
            return plain
        codes, scales = blocks.take_rows(u, _take)
        return Packed("e3m0", len(u), (_pack(codes), scales))

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """Decode a push to a dense delta."""
        if is_plain(packed):
            return expand_plain(packed, size)
        pairs, scales = arrays_of(packed, size, 2)
        check_array(pairs, "u1", -(-size // 2), "bytes of 4-bit numbers")
        check_array(scales, "<f4", blocks.count(size), "scales")
        powers = np.ldexp(np.float32(1), -np.arange(8)).astype(np.float32)
        powers[ZERO] = 0
        values = np.concatenate([powers, -powers])

        def fill(rows: Array, first: int) -> None:
            start = first * blocks.BLOCK // 2
            part = pairs[start : start + -(-rows.size // 2)]
            codes = np.stack([part & 15, part >> 4], axis=1).reshape(-1)[: rows.size]
            np.take(values, codes.reshape(rows.shape), out=rows)
            with np.errstate(over="ignore", invalid="ignore"):  # of a hostile sender
                rows *= scales[first : first + len(rows), None]

        return Delta(blocks.fill_rows(size, fill))


def _take(rows: Vector) -> blocks.Part:
    """(codes uint8[n], scales float32[rows]); leaves the residual in `rows`."""
    on_host = isinstance(rows, np.ndarray)
    mantissa, exponent = np.frexp(rows) if on_host else rows.frexp()
    is_low = abs(mantissa) < 0.75
    power = choose(is_low, exponent - 1, exponent)
    power = choose((rows == 0) | (power < LOWEST), power * 0 + NONE, power)
    top = to_host(power.max(1) if on_host else power.amax(1)).astype(np.int64)
    scales = np.where(top == NONE, 0.0, np.ldexp(1.0, np.maximum(top, LOWEST))).astype("<f4")
    below = top[:, None] - to_host(power)
    below[(below == ZERO) & to_host(is_low)] = ZERO - 1
    codes = np.clip(below, 0, ZERO).astype(np.uint8)
    codes[top == NONE] = ZERO
    codes[to_host(rows) < 0] |= 8
    powers = np.ldexp(1.0, -np.arange(8))
    powers[ZERO] = 0
    values = np.concatenate([powers, -powers])[codes]
    rows -= column_like(rows, scales) * _like(rows, values)
    return codes.reshape(-1), scales


def _like(rows: Vector, values: Array) -> Vector:
    """`values` [n, m] where `rows` is and of its dtype."""
    if isinstance(rows, np.ndarray):
        return values.astype(rows.dtype)
    return rows.new_tensor(values)


def _pack(codes: Array) -> Array:
    """uint8[ceil(n/2)]: codes of four bits, two in a byte."""
    padded = np.zeros(-(-codes.size // 2) * 2, np.uint8)
    padded[: codes.size] = codes
    packed: Array = padded[::2] | padded[1::2] << 4
    return packed
