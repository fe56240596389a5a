"""k random elements are sent without positions: server and worker draw these from one seed.

Random-k sparsification with error feedback: Stich et al., "Sparsified SGD with Memory", NeurIPS
2018; without, and unbiased: Wangni et al., "Gradient Sparsification for Communication-Efficient
Distributed Optimization", NeurIPS 2018. The slice is split into k strata of equal length, give or
take one element, and one element of each is drawn. So every element is drawn with probability
1/width of its stratum, which is the papers' k/d where k divides d; the drawn elements are sorted,
and

    E ||u - Q(u)||^2 = (1 - k/d) ||u||^2        (exactly, if k divides d)

A push carries a seed and k, 8 bytes each. The numbers of a seed must never differ between versions
of numpy: only the raw numbers of Philox (Salmon et al. 2011) are used, which numpy guarantees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Gt, Le

from dlctl.compress.base import Compressor, Delta
from dlctl.compress.plain import (
    DENSE_BELOW,
    Least,
    check_array,
    expand_plain,
    is_plain,
    take_plain,
)
from dlctl.compress.values import Precision, arrays_of, as_float32, check_values, take_values
from dlctl.errors import RemoteProtocolError
from dlctl.job.config import STRICT
from dlctl.job.settings import Live
from dlctl.model.vector import Vector, indices_like, matrix_like
from dlctl.wire.messages import Array, Packed

HEAD_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomKOptions:
    __pydantic_config__ = STRICT

    density: Live[Annotated[float, Gt(0), Le(1)]] = 0.01
    """Fraction of the elements in a push: 0.01 sends 1 % of them, at least one."""
    values: Precision = "float32"
    """Precision of the sent values. "float16" and "bfloat16" halve the bytes; rounding errors go
    into a later push. `unbiased` has no residual, so it only accepts "float32"."""
    unbiased: bool = False
    """Divides sent values by the probability of being drawn, about the density, so that a push is
    unbiased, and discards all others: without error feedback. false: all others wait for a later
    push."""
    dense_below: Least = DENSE_BELOW
    """A server's slice with fewer elements than this is sent uncompressed."""


class RandomK(Compressor):
    """Arrays on the wire: seed and k uint8[16], values [k] (`values.py`); or a plain form."""

    Options: ClassVar[type[Any]] = RandomKOptions
    selects = True

    def __init__(self, options: RandomKOptions) -> None:
        self.options = options
        self.density = options.density
        self.reseed(0)

    def reseed(self, *numbers: int) -> None:
        """Seeds the generator of the pushes' seeds."""
        self._seeds = np.random.Philox(np.random.SeedSequence(numbers))

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take k elements of `u`; all others stay, or are discarded with `unbiased`."""
        plain = take_plain("randomk", u, self.options.dense_below)
        if plain is not None:
            return plain
        size = len(u)
        count = max(1, int(self.density * size))
        seed = int(self._seeds.random_raw())
        drawn = draw(seed, count, size)
        where = indices_like(u, drawn)
        picked = u[where]
        if self.options.unbiased:
            picked *= matrix_like(picked, widths_of(count, size))
            u[:] = 0
            values = take_values(picked, self.options.values)
        else:
            values = take_values(picked, self.options.values)
            u[where] = picked
        return Packed("randomk", size, (_head(seed, count), values))

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """A sparse delta: positions drawn from the push's seed."""
        if is_plain(packed):
            return expand_plain(packed, size)
        head, values = arrays_of(packed, size, 2)
        check_array(head, "u1", HEAD_BYTES, "bytes of a seed and a number")
        check_values(values)
        seed, count = (int(number) for number in head.copy().view("<u8"))
        if values.size != count or count > size:
            raise RemoteProtocolError(f"{values.size} of {count} values for a shard of {size}")
        found = draw(seed, count, size)
        return Delta(as_float32(values), found)


def draw(seed: int, count: int, size: int) -> Array:
    """int64[count], strictly increasing, in [0, size): one of each stratum. count <= size."""
    if count == 0:
        return np.empty(0, np.int64)
    raw = np.random.Philox(key=seed).random_raw(count)
    widths = widths_of(count, size)
    starts = np.cumsum(widths) - widths
    return starts + (raw % widths.astype(np.uint64)).astype(np.int64)


def widths_of(count: int, size: int) -> Array:
    """int64[count]: the elements of each stratum, more of them in the first ones. count > 0."""
    width, longer = divmod(size, count)
    return width + (np.arange(count, dtype=np.int64) < longer)


def _head(seed: int, count: int) -> Array:
    return np.array([seed, count], "<u8").view(np.uint8)
