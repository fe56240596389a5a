"""GaussianK exactly as its authors published it: an oracle to compare `gaussian.py` with.

The selection is exactly that of the code of Shi et al., "Understanding Top-k Sparsification in
Distributed Deep Learning", 2019 (hclhkbu/GaussianK-SGD, `GaussianCompressor`). Its three hazards:

1. After the third correction of the threshold the selection is not repeated: the sent elements
   belong to the previous threshold. They may be far more or fewer than k, or none at all.
2. It gathers the ragged selections of all workers in slices of equal length, so duplicates and the
   remainder are lost. Here a push carries its own count, so this hazard does not exist.
3. The threshold contains the mean, but is compared with |u|: with a mean that is not near zero the
   two tails are cut in different places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Gt, Le

from dlctl.compress.gaussian import Gaussian, GaussianOptions
from dlctl.compress.magnitudes import Found, Magnitudes
from dlctl.job.settings import Live

CORRECTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianRefOptions(GaussianOptions):
    density: Live[Annotated[float, Gt(0), Le(1)]] = 0.01
    """Target fraction of the elements in a push. It may be far more or less, or nothing at all."""


class GaussianRef(Gaussian):
    """The `gaussian` compressor with the selection of the published code, for comparison."""

    KIND: ClassVar[str] = "gaussian-ref"
    Options: ClassVar[type[Any]] = GaussianRefOptions

    def _select(self, magnitudes: Magnitudes, k: int, threshold: float) -> Found:
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
