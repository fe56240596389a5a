"""The k largest elements by a threshold that a sample suggests: many times faster than `topk`.

This is the selection of Deep Gradient Compression (Lin et al., ICLR 2018, section 5, and its code):
the threshold is a quantile of a strided sample with a random start, lowered until at least 0.8 k
elements reach it, and if more than k do, the k largest of those are taken. One thing is added: the
final threshold of the last push is tried first. Residuals change slowly, so most pushes are one
pass over memory.

So the sent elements are never wrong: the n elements sent are the n largest, 0.8 k <= n <= k unless
fewer are nonzero, and for every u of d elements

    ||u - Q(u)||^2 <= (1 - n/d) ||u||^2

Momentum correction and masking, the other half of DGC, are in the method `dgc`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Gt, Le

from dlctl.compress.base import Compressor, Delta, rng_of
from dlctl.compress.magnitudes import Found, Magnitudes, Scratch, largest_of, smallest_of
from dlctl.compress.plain import DENSE_BELOW, Least, expand_plain, take_chosen, take_whole
from dlctl.compress.values import Precision
from dlctl.job.config import STRICT
from dlctl.job.settings import Live
from dlctl.model.vector import Vector
from dlctl.wire.messages import Packed

KIND = "topk-sampled"
PASSES_MAX = 10
ENOUGH = 0.8
"""The least fraction of k to find: with fewer elements the threshold is lowered."""
AIM = 1.05
"""The fraction of k to aim at: a few elements too many cost less than another pass."""
SAMPLED_MIN = 400
"""Elements of a sample that should reach the threshold: their number is within 20 % then."""
STEEPNESS = 8
"""d log(number) / -d log(threshold) where 1 % of a normal distribution are above the threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledOptions:
    __pydantic_config__ = STRICT

    density: Live[Annotated[float, Gt(0), Le(1)]] = 0.01
    """Largest fraction of the elements in a push: 0.01 sends the largest 1 %, at least one, and
    now and then up to a fifth less."""
    values: Precision = "float32"
    """Precision of the sent values. "float16" and "bfloat16" halve their bytes; rounding errors go
    into a later push."""
    sample: Annotated[float, Gt(0), Le(1)] = 0.01
    """Fraction of the elements that is sampled to find a threshold; more if the sample would
    contain less than 400 of the elements to send."""
    dense_below: Least = DENSE_BELOW
    """A server's slice with fewer elements than this is sent uncompressed."""


class SampledTopK(Compressor):
    """Arrays on the wire: a plain form (`plain.py`), mostly "chosen"."""

    Options: ClassVar[type[Any]] = SampledOptions
    selects = True

    def __init__(self, options: SampledOptions) -> None:
        self.options = options
        self.density = options.density
        self._thresholds: dict[tuple[int, int], float] = {}
        """(shard, its size) -> the threshold that the last push suggests for the next one."""
        self._scratch = Scratch()
        self.reseed(0)

    def reseed(self, *numbers: int) -> None:
        """Seeds the start positions of samples."""
        self._random = rng_of(numbers)

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take about the k largest elements of `u`; their rounding errors stay."""
        size = len(u)
        if size < max(self.options.dense_below, 1):
            return take_whole(KIND, u)
        k = max(1, int(self.density * size))
        key = (shard, size)
        magnitudes = Magnitudes(u, self._scratch)
        found, threshold = self._select(magnitudes, k, self._thresholds.get(key, 0.0))
        number = len(found.where)
        if number:
            found = largest_of(found, min(k, number))
            threshold = smallest_of(found.values) if number >= k else threshold
            threshold *= float((min(k, number) / (AIM * k)) ** (1 / STEEPNESS))
        self._thresholds[key] = threshold if np.isfinite(threshold) else 0.0
        return take_chosen(KIND, u, found.where, self.options.values, found.values)

    def _select(self, magnitudes: Magnitudes, k: int, known: float) -> tuple[Found, float]:
        """Select at least 0.8 k elements, or all nonzero ones; returns their threshold, too. After
        a pass that finds too few, the next one asks for twice as many; the last pass takes all
        nonzero elements.
        """
        least = magnitudes.smallest_positive()
        threshold = known or self._sampled(magnitudes, k)
        wanted = k
        for _ in range(PASSES_MAX - 1):
            found = magnitudes.at_least(max(threshold, least))
            if len(found.where) >= ENOUGH * k or threshold <= least:
                return found, threshold
            threshold = min(threshold / 2, self._sampled(magnitudes, wanted))
            wanted *= 2
        return magnitudes.at_least(least), least

    def _sampled(self, magnitudes: Magnitudes, wanted: int) -> float:
        """A threshold that about `wanted` elements reach, estimated from a sample."""
        size = len(magnitudes.u)
        number = max(self.options.sample * size, SAMPLED_MIN * size / wanted)
        stride = max(1, int(size / number))
        start = int(self._random.integers(stride))
        sample = magnitudes.sample(start, stride)
        rank = min(sample.size, ceil(AIM * wanted * sample.size / size))
        return float(np.partition(sample, sample.size - rank)[sample.size - rank])

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """A sparse delta, or a dense one of a small shard."""
        return expand_plain(packed, size)
