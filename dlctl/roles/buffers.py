"""Buffers of the replicas (BatchNorm statistics), averaged by the samples that each has seen."""

from __future__ import annotations

import numpy as np

from dlctl.flat import AVERAGED, Layout
from dlctl.messages import Array


class AveragedBuffers:
    """Held by shard 0. Integers and flags are not averaged: they are the busiest replica's."""

    def __init__(self, layout: Layout, initial: Array) -> None:
        self._initial = initial
        self._finite = np.isfinite(initial)
        """A mask may hold -inf for good; what began finite has to stay so."""
        self._latest: dict[int, tuple[int, Array]] = {}
        self._floating = np.concatenate(
            [np.full(e.size, e.dtype.startswith(("float", "bfloat"))) for e in layout.entries
             if e.kind == AVERAGED] or [np.zeros(0, bool)]
        )  # fmt: skip

    @property
    def size(self) -> int:
        return int(self._initial.size)

    def push(self, slot: int, samples: int, values: Array) -> bool:
        """A replica's buffers after `samples` samples; False if they do not fit or are poison.

        Of one that has computed nothing they say nothing, and what was known of the slot stays.
        """
        if values.size != self.size or not np.isfinite(values[self._finite]).all():
            return False
        if samples > 0:
            self._latest[slot] = (samples, values)
        return True

    def average(self) -> Array:
        """float64[n]: the initial values until a replica has computed and pushed."""
        if not self._latest:
            return self._initial
        rows = [self._latest[slot] for slot in sorted(self._latest)]
        total = sum(samples for samples, _ in rows)
        mean = np.zeros(self.size)
        for samples, values in rows:
            mean += values * (samples / total)
        busiest = max(rows, key=lambda row: row[0])[1]
        return np.where(self._floating, mean, busiest)
