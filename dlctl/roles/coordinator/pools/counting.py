"""Data that the workers' training loops have on their own: portions only count its samples.

A portion is leased for about as many samples as it has; how many were trained, its holder says when
it is done. That of a dead worker is leased again, and counts what its next holder trains.
"""

from __future__ import annotations

import math

from dlctl.job import batches
from dlctl.roles.coordinator.pools.portions import PortionPool

PORTIONS = 1024
"""A data epoch of so many portions is no pass over anything; but a complete one is short to
persist."""


class CountingPool(PortionPool):
    def __init__(self, portion_samples: int) -> None:
        super().__init__(PORTIONS * portion_samples, portion_samples, math.inf)

    def most(self, portion: int) -> int:
        return batches.LOOP_STEP_MAX

    def epochs_done(self) -> float:
        return 0.0
