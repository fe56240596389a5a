"""One bit per element, and two values for each block of 1,024: the means by sign.

1-bit SGD (Seide et al., Interspeech 2014): an element is sent as one bit, whether it is >= 0, and
rebuilt as the mean of the elements of its column that were >= 0, or of those that were not; the
error stays and is added to the next gradient. Here a block replaces the paper's column. With one
mean it is
the scaled sign of Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, for which

    ||u - Q(u)||^2 = (1 - ||u||_1^2 / (d ||u||_2^2)) ||u||^2        (d: the elements of a block)

and two means are never worse than one. A mean has many bits, so u minus it is rounded to the
precision of u: per push and element at most half a unit in its last place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from dlctl import kernels
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBitOptions:
    __pydantic_config__ = STRICT

    means: Literal["two", "one"] = "two"
    """"two": one mean for the elements of a block that are positive or zero and one for those that
    are negative. "one": the mean magnitude, with either sign."""
    dense_below: Least = DENSE_BELOW
    """A server's slice with fewer elements than this is sent uncompressed."""


class OneBit(Compressor):
    """Arrays on the wire: bits uint8[ceil(d/8)], lowest bit first, and means float32[2 n] for the
    n = ceil(d/1024) blocks: those of the ones, then those of the zeros. Or a plain form.
    """

    Options: ClassVar[type[Any]] = OneBitOptions

    def __init__(self, options: OneBitOptions) -> None:
        self.options = options

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take from every element of `u` the mean of its sign."""
        plain = take_plain("onebit", u, self.options.dense_below)
        if plain is not None:
            return plain
        bits, ones, zeros = blocks.take_rows(u, self._take)
        return Packed("onebit", len(u), (bits, np.concatenate([ones, zeros])))

    def _take(self, rows: Vector) -> blocks.Part:
        flags = rows >= 0
        ones, zeros = self._means(rows, flags)
        rows -= choose(flags, column_like(rows, ones), column_like(rows, zeros))
        return _pack(flags), ones, zeros

    def _means(self, rows: Vector, flags: Vector) -> tuple[Array, Array]:
        """float32[n] each: the means of the elements with the flag, and of those without."""
        above = to_host(rows.clip(0, None).sum(1)).astype(np.float64)
        below = to_host(rows.clip(None, 0).sum(1)).astype(np.float64)
        if self.options.means == "one":
            mean = ((above - below) / rows.shape[1]).astype(np.float32)
            return mean, -mean
        number = to_host(flags.sum(1)).astype(np.float64)
        others = np.maximum(rows.shape[1] - number, 1)
        return (above / np.maximum(number, 1)).astype(np.float32), (below / others).astype(
            np.float32
        )

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """Decode a push to a dense delta."""
        if is_plain(packed):
            return expand_plain(packed, size)
        bits, means = arrays_of(packed, size, 2)
        number = blocks.count(size)
        check_array(bits, "u1", -(-size // 8), "bytes of signs")
        check_array(means, "<f4", 2 * number, "means")
        loop = kernels.from_signs()
        if loop is not None and kernels.takes(bits) and kernels.takes(means):
            values = np.empty(size, np.float32)
            loop(bits, means, values)
            return Delta(values)
        ones, zeros = means[:number, None], means[number:, None]

        def fill(rows: Array, first: int) -> None:
            start = first * blocks.BLOCK // 8
            part = bits[start : start + -(-rows.size // 8)]
            flags = np.unpackbits(part, count=rows.size, bitorder="little").view(bool)
            here = slice(first, first + len(rows))
            np.copyto(rows, zeros[here])
            np.copyto(rows, ones[here], where=flags.reshape(rows.shape))

        return Delta(blocks.fill_rows(size, fill))


def _pack(flags: Vector) -> Array:
    """uint8[ceil(n/8)] on the host; on a GPU they are packed there."""
    if isinstance(flags, np.ndarray):
        return np.packbits(flags, bitorder="little")
    eights = flags.reshape(-1, 8).byte()
    weights = eights.new_tensor([1, 2, 4, 8, 16, 32, 64, 128])
    return to_host((eights * weights).sum(1).byte())
