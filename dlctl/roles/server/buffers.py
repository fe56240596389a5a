"""Buffers of the replicas (BatchNorm statistics), averaged by the samples that each has seen."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import numpy as np

from dlctl.flat import AVERAGED, Layout
from dlctl.messages import Array

FORGET_AFTER = 4
"""Pushes of buffers, on an average of each who has some here: who is no member any more, and has
not pushed during so many, is forgotten."""


class _Row(NamedTuple):
    samples: int
    values: Array
    number: int
    """Of this push, among all."""


class AveragedBuffers:
    """Held by shard 0. Integers and flags are not averaged: they are the busiest replica's."""

    def __init__(self, layout: Layout, initial: Array) -> None:
        self._initial = initial
        self._finite = np.isfinite(initial)
        """A mask may hold -inf for good; what began finite has to stay so."""
        self._latest: dict[int, _Row] = {}
        self._pushes = 0
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
            self._pushes += 1
            self._latest[slot] = _Row(samples, values, self._pushes)
        return True

    def keep(self, members: Set[int]) -> None:
        """Forget who takes part no more, when the others have gone on for a while without it.

        Not at once: at the end of a run all leave, one after the other, and what is saved then is
        of all of them.
        """
        newest_to_forget = self._pushes - FORGET_AFTER * len(self._latest)
        for slot, row in list(self._latest.items()):
            if members and slot not in members and row.number <= newest_to_forget:
                del self._latest[slot]

    def average(self) -> Array:
        """float64[n]: the initial values until a replica has computed and pushed."""
        if not self._latest:
            return self._initial
        rows = [self._latest[slot] for slot in sorted(self._latest)]
        total = sum(row.samples for row in rows)
        mean = np.zeros(self.size)
        for row in rows:
            mean += row.values * (row.samples / total)
        busiest = max(rows, key=lambda row: row.samples).values
        return np.where(self._floating, mean, busiest)
