"""The model's averaged buffers (BatchNorm statistics), which shard 0 stores for all replicas.

They travel as float64, whatever their dtype in the model: a value is accepted only if it is finite
there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

import numpy as np

from dlctl.model.flat import AVERAGED, Layout, TensorEntry
from dlctl.wire.messages import Array

FORGET_AFTER = 4
"""Average number of pushes of buffers per replica after which the buffers of a replica that is no
longer a member, and has not pushed meanwhile, are dropped."""
_FLOAT64_MAX = float(np.finfo(np.float64).max)
_LARGEST = {
    "float16": float(np.finfo(np.float16).max),
    "bfloat16": float.fromhex("0x1.fep127"),
    "float32": float(np.finfo(np.float32).max),
    "bool": 1.0,
    "uint8": 2.0**8 - 1,
    **{f"int{bits}": 2.0 ** (bits - 1) - 1 for bits in (8, 16, 32)},
    "int64": float(np.nextafter(2.0**63, 0)),
}
"""The largest magnitude of both signs of each dtype; of others only what float64 holds is known."""


class _Row(NamedTuple):
    samples: int
    values: Array
    number: int
    """The number of this push among all pushes of buffers."""


class AveragedBuffers:
    """Integers and flags are not averaged: they are the busiest replica's."""

    def __init__(self, layout: Layout, initial: Array) -> None:
        self._initial = initial
        self._finite = np.isfinite(initial)
        """A mask may hold -inf for good; what began finite has to stay so."""
        self._largest = largest_values(layout)[self._finite]
        self._latest: dict[int, _Row] = {}
        self._pushes = 0
        self._floating = _per_element(layout, lambda e: e.dtype.startswith(("float", "bfloat"))) > 0

    @property
    def size(self) -> int:
        return int(self._initial.size)

    def push(self, slot: int, samples: int, values: Array) -> bool:
        """Take a replica's buffers after `samples` samples; False if they are invalid.

        Buffers after 0 samples carry no information: earlier ones of the slot are retained.
        """
        if not self._are_valid(values):
            return False
        if samples > 0:
            self._pushes += 1
            self._latest[slot] = _Row(samples, values, self._pushes)
        return True

    def replace(self, values: Array) -> bool:
        """Take buffers that a replica hands on, in place of all there are; False if they are
        invalid.
        """
        if not self._are_valid(values):
            return False
        self._initial = np.array(values)
        self._latest.clear()
        return True

    def _are_valid(self, values: Array) -> bool:
        if values.size != self.size or values.dtype != np.float64:
            return False
        return bool((np.abs(values[self._finite]) <= self._largest).all())

    def keep(self, members: Set[int]) -> None:
        """Drop the buffers of replicas that have left, once the others have pushed `FORGET_AFTER`
        times each, on average.

        Not immediately: at the end of a run all replicas leave, one after the other, and the final
        checkpoint must include all of them.
        """
        newest_to_forget = self._pushes - FORGET_AFTER * len(self._latest)
        for slot, row in list(self._latest.items()):
            if members and slot not in members and row.number <= newest_to_forget:
                del self._latest[slot]

    def average(self) -> Array:
        """float64[n]; the initial values until a replica has computed and pushed."""
        if not self._latest:
            return self._initial
        rows = [self._latest[slot] for slot in sorted(self._latest)]
        total = sum(row.samples for row in rows)
        mean = np.zeros(self.size)
        for row in rows:
            mean += row.values * (row.samples / total)
        busiest = max(rows, key=lambda row: row.samples).values
        return np.where(self._floating, mean, busiest)


def fit_their_dtypes(values: Array, layout: Layout) -> bool:
    """Whether no finite value of the buffers, float64[n], is infinite in the buffer's dtype."""
    return bool(((np.abs(values) <= largest_values(layout)) | ~np.isfinite(values)).all())


def largest_values(layout: Layout) -> Array:
    """float64[n]: the largest finite value of each element's dtype."""
    return _per_element(layout, lambda entry: _LARGEST.get(entry.dtype, _FLOAT64_MAX))


def _per_element(layout: Layout, value_of: Callable[[TensorEntry], float]) -> Array:
    entries = [entry for entry in layout.entries if entry.kind == AVERAGED]
    parts = [np.full(entry.size, value_of(entry)) for entry in entries]
    return np.concatenate(parts or [np.zeros(0)])
