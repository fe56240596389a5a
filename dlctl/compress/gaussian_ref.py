"""GaussianK exactly as its authors published it: an oracle to compare `gaussian.py` with.

The selection is that of the code beside Shi et al., "Understanding Top-k Sparsification in
Distributed Deep Learning", 2019 (hclhkbu/GaussianK-SGD, `GaussianCompressor`), to the last element.
Its three hazards:

1. After the third correction of the threshold nothing is selected anew: the elements that are sent
   belong to the threshold before. They may be far more or fewer than k, or none at all.
2. It gathers the ragged selections of all workers in slices of equal length, so duplicates and the
   remainder are lost. Here a push carries its own count, and nothing of this is left.
3. The threshold contains the mean, and what is compared with it is |u|: with a mean that is not
   near zero the two tails are cut in different places.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dlctl.compress.base import Delta
from dlctl.compress.gaussian import GaussianOptions, start_threshold
from dlctl.compress.magnitudes import Found, Magnitudes, Scratch
from dlctl.compress.plain import expand_plain, take_chosen, take_plain
from dlctl.messages import Packed
from dlctl.vector import Vector

CORRECTIONS = 3


class GaussianRef:
    """Arrays on the wire: a plain form (`plain.py`)."""

    Options: ClassVar[type[Any]] = GaussianOptions

    def __init__(self, options: GaussianOptions) -> None:
        self.options = options
        self.density = options.density
        self._scratch = Scratch()

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take what the published code selects; in their places stays what was rounded off."""
        plain = take_plain("gaussian-ref", u, self.options.dense_below)
        if plain is not None:
            return plain
        k = max(1, int(self.density * len(u)))
        found = _select(Magnitudes(u, self._scratch), k, start_threshold(u, self.density))
        return take_chosen("gaussian-ref", u, found.where, self.options.values, found.values)

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        return expand_plain(packed, size)


def _select(magnitudes: Magnitudes, k: int, threshold: float) -> Found:
    for _ in range(CORRECTIONS):
        found = magnitudes.above(threshold)
        number = len(found.where)
        if number < 2 * k / 3:
            threshold *= 0.5
        elif number > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return found
