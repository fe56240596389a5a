"""Steps of sparse pushes: these are held as received, and their mean is as sparse as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dlctl.algorithms.sync import HoldingSide
from dlctl.compress.base import Delta
from dlctl.messages import Array, Push


class SparseSide(HoldingSide):
    """A mixin for a side that decides when a step is made."""

    def _kept(self, delta: Delta) -> Delta:
        return delta

    def _mean_of(self, kept: Sequence[Delta], shares: Sequence[np.float32]) -> Delta:
        return mean_of(kept, shares, self.shard.size)


def even_shares(pushes: Sequence[Push]) -> list[np.float32]:
    """Equal weights for all pushes, whatever their samples."""
    return [np.float32(1 / len(pushes))] * len(pushes)


def mean_of(
    deltas: Sequence[Delta], shares: Sequence[np.float32], size: int, *, of_senders: bool = False
) -> Delta:
    """Sparse if all deltas are. of_senders: an entry is divided by the shares of the deltas that
    have it, not by those of all.
    """
    values, shared = np.zeros(size, np.float32), np.zeros(size if of_senders else 0, np.float32)
    for delta, share in zip(deltas, shares, strict=True):
        where = _where(delta)
        values[where] += share * delta.values
        if of_senders:
            shared[where] += share
    if of_senders:
        np.divide(values, shared, out=values, where=shared > 0)
    if any(delta.indices is None for delta in deltas):
        return Delta(values)
    found = _union([delta.indices for delta in deltas], size)
    return Delta(values[found], found)


def _where(delta: Delta) -> Any:
    return slice(None) if delta.indices is None else delta.indices


def _union(indices: Sequence[Array | None], size: int) -> Array:
    """int64[n], ascending."""
    flags = np.zeros(size, bool)
    for where in indices:
        flags[where] = True
    return np.flatnonzero(flags)
