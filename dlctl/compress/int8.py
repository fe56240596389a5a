"""Every element in 8 bits: a whole number from -127 to 127, times the scale of its block of 1,024.

Linear quantisation with a shared scale (as in Dettmers, "8-Bit Approximations for Parallelism in
Deep Learning", ICLR 2016); stochastic rounding as in QSGD (Alistarh et al., NeurIPS 2017). Here
with error feedback: what the rounding takes away stays. For a block

    scale = max |u| / 127, rounded up to 8 significant bits,   q = round(u / scale),

and q and scale are sent.

A scale of so few bits makes q * scale exact in float32, and u - q * scale, too, when rounding is to
nearest: nothing is lost. With stochastic rounding the difference is rounded to the precision of u.
To nearest, |u - Q(u)| <= scale/2 for each element, so ||u - Q(u)||^2 <= d/4 * scale^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from dlctl.compress import blocks
from dlctl.compress.base import Compressor, Delta, rng_of
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
from dlctl.model.vector import Vector, choose, column_like, floor, to_host
from dlctl.wire.messages import Array, Packed

LIMIT = 127
SCALE_MIN = 2.0**-126
"""A block of smaller numbers waits until it has grown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Options:
    __pydantic_config__ = STRICT

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """"nearest" has the smaller error. "stochastic" rounds up or down at random, so that a push is
    unbiased."""
    dense_below: Least = DENSE_BELOW
    """A server's slice with fewer elements than this is sent uncompressed."""


class Int8(Compressor):
    """Arrays on the wire: q as uint8[d] (two's complement), scales float32[ceil(d/1024)]; or a
    plain form (`plain.py`).
    """

    Options: ClassVar[type[Any]] = Int8Options

    def __init__(self, options: Int8Options) -> None:
        self.options = options
        self.reseed(0)

    def reseed(self, *numbers: int) -> None:
        """Seeds stochastic rounding."""
        self._random = rng_of(numbers)

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take every element of `u` in 8 bits."""
        plain = take_plain("int8", u, self.options.dense_below)
        return plain or Packed("int8", len(u), blocks.take_rows(u, self._take))

    def _take(self, rows: Vector) -> blocks.Part:
        largest = to_host(abs(rows).max(1) if isinstance(rows, np.ndarray) else rows.abs().amax(1))
        scales = scales_of(largest)
        steps = column_like(rows, scales)
        codes = rows / steps
        if self.options.rounding == "nearest":
            codes = codes.round()
        else:
            codes += self._noise(rows)
            # The nearest number above 126.99 + 0.99 may be 128.
            codes = floor(codes).clip(-LIMIT, LIMIT)
        rows -= codes * steps
        return _bytes(codes), scales

    def _noise(self, rows: Vector) -> Vector:
        """Uniform in [0, 1), one for each element; those of a row and of a column are not
        independent, which does not affect any mean. So few numbers are copied to a GPU quickly.
        """
        height, width = rows.shape
        down = column_like(rows, self._random.random(height, dtype=np.float32))
        across = column_like(rows, self._random.random(width, dtype=np.float32)).reshape(1, -1)
        noise = down + across
        return choose(noise >= 1, noise - 1, noise)

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """Decode a push to a dense delta."""
        if is_plain(packed):
            return expand_plain(packed, size)
        codes, scales = arrays_of(packed, size, 2)
        check_array(codes, "u1", size, "numbers of 8 bits")
        check_array(scales, "<f4", blocks.count(size), "scales")
        signed = codes.view(np.int8)

        def fill(rows: Array, first: int) -> None:
            start = first * blocks.BLOCK
            rows[:] = signed[start : start + rows.size].reshape(rows.shape)
            with np.errstate(over="ignore", invalid="ignore"):  # of a hostile sender
                rows *= scales[first : first + len(rows), None]

        return Delta(blocks.fill_rows(size, fill))


def scales_of(largest: Array) -> Array:
    """float32[n]: `largest` / 127, rounded up to 8 significant bits; at least `SCALE_MIN`."""
    mantissa, exponent = np.frexp(largest.astype(np.float64) / LIMIT)
    rounded = np.ldexp(np.ceil(mantissa * 256), exponent - 8)
    scales: Array = np.maximum(rounded, SCALE_MIN).astype(np.float32)
    return scales


def _bytes(codes: Vector) -> Array:
    """uint8[n] on the host: whole numbers from -127 to 127, as int8."""
    on_host = isinstance(codes, np.ndarray)
    signed = codes.astype(np.int8) if on_host else to_host(codes.char())
    octets: Array = signed.view(np.uint8).reshape(-1)
    return octets
