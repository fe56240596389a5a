"""About the k largest elements, by the threshold that fits if they were normally distributed.

GaussianK-SGD (Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", 2019):
with mean mu and standard deviation sigma of u, and the density rho = k/d,

    threshold = mu + sigma * Phi^-1(1 - rho/2),    sent is every element with |u| > threshold.

The paper's code corrects the threshold by factors of 0.5 and 1.5, at most three times; on vectors
that are not normal these oscillate (`gaussian_ref.py` is that code). Here the threshold starts at
the same place and is then bisected between one that selects too many and one that selects too few:
at most 10 passes over memory until 2k/3 to 4k/3 elements are selected. What is still more than 4k/3
is cut to its 4k/3 largest, and at least one element is sent unless all are zero.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Gt, Le

from dlctl.compress.base import Compressor, Delta
from dlctl.compress.magnitudes import Found, Magnitudes, Scratch, largest_of
from dlctl.compress.plain import DENSE_BELOW, Least, expand_plain, take_chosen, take_plain
from dlctl.compress.values import Precision
from dlctl.job.config import STRICT
from dlctl.job.settings import Live
from dlctl.model.vector import Vector, host_view
from dlctl.wire.messages import Packed

PASSES_MAX = 10
STATISTICS_BLOCK = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianOptions:
    __pydantic_config__ = STRICT

    density: Live[Annotated[float, Gt(0), Le(1)]] = 0.01
    """Target fraction of the elements in a push: with 0.01 it is 0.67 % to 1.33 % of them."""
    values: Precision = "float32"
    """Precision of the sent values. "float16" and "bfloat16" halve their bytes; rounding errors go
    into a later push."""
    dense_below: Least = DENSE_BELOW
    """A server's slice with fewer elements than this is sent uncompressed."""


class Gaussian(Compressor):
    """Arrays on the wire: a plain form (`plain.py`)."""

    KIND: ClassVar[str] = "gaussian"
    Options: ClassVar[type[Any]] = GaussianOptions
    selects = True

    def __init__(self, options: GaussianOptions) -> None:
        self.options = options
        self.density = options.density
        self._scratch = Scratch()

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take about the k largest of `u`; their rounding errors stay."""
        plain = take_plain(self.KIND, u, self.options.dense_below)
        if plain is not None:
            return plain
        k = max(1, int(self.density * len(u)))
        found = self._select(Magnitudes(u, self._scratch), k, start_threshold(u, self.density))
        return take_chosen(self.KIND, u, found.where, self.options.values, found.values)

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        return expand_plain(packed, size)

    def _select(self, magnitudes: Magnitudes, k: int, threshold: float) -> Found:
        """2k/3 to 4k/3 elements; fewer only if 10 passes do not find more."""
        found = _bisect(magnitudes, k, threshold)
        most = max(1, 4 * k // 3)
        return largest_of(found, most) if len(found.where) > most else found


def _bisect(magnitudes: Magnitudes, k: int, threshold: float) -> Found:
    """2k/3 to 4k/3 elements; more or fewer than that only if 10 passes do not find them.

    Too few elements cannot be corrected later, so the last pass uses the highest threshold that was
    too low.
    """
    low, high = 0.0, np.inf
    found = magnitudes.above(threshold)
    for _ in range(PASSES_MAX - 2):
        number = len(found.where)
        if 2 * k <= 3 * number <= 4 * k:
            return found
        low, high = (threshold, high) if 3 * number > 4 * k else (low, threshold)
        threshold = 2 * max(threshold, 0.0) if high == np.inf else (max(low, 0.0) + high) / 2
        found = magnitudes.above(threshold)
    return found if 3 * len(found.where) >= 2 * k else magnitudes.above(max(low, 0.0))


def start_threshold(u: Vector, density: float) -> float:
    """mu + sigma * Phi^-1(1 - density/2) of `u`, finite float32 or float64 [n], n > 1."""
    from statistics import NormalDist  # only here: it takes 10 ms to import

    mean, deviation = statistics_of(u)
    # From the other end: 1 - density/2 is 1 for the smallest densities.
    rest = max(density / 2, sys.float_info.min)
    quantile = -NormalDist().inv_cdf(rest) if density < 1 else 0.0
    return mean + deviation * quantile


def statistics_of(u: Vector) -> tuple[float, float]:
    """The mean and the standard deviation (with n - 1) of `u`, summed in float64."""
    u = host_view(u)
    if not isinstance(u, np.ndarray):
        return float(u.mean()), float(u.std())
    total = sum(float(part.sum(dtype=np.float64)) for part in _parts(u))
    mean = total / u.size
    squares = 0.0
    for part in _parts(u):
        centred = part - part.dtype.type(mean)
        squares += float(centred @ centred)
    return mean, float(np.sqrt(squares / (u.size - 1)))


def _parts(u: Any) -> Any:
    return (u[lo : lo + STATISTICS_BLOCK] for lo in range(0, u.size, STATISTICS_BLOCK))
