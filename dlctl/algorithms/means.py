"""How a step of several pushes is made of them: of a side that holds them (`holding.py`).

A method declares one beside its shard side: `Method(shard=Barrier, mean=SparseMean)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from dlctl.compress.base import Delta
from dlctl.shards.base import Shard
from dlctl.util import threads
from dlctl.util.threads import BLOCK, scratch
from dlctl.wire.messages import Array, Push


class Holder(Protocol):
    """What a mean knows of its shard side."""

    options: Any
    shard: Shard
    lo: int
    """Where the shard begins in its table."""


class Mean:
    """The mean by samples, of pushes that are dense once they have arrived."""

    takes_parts: ClassVar[bool] = False
    """Whether a push may contain only some elements, and leave the others undefined."""

    is_of_gradients: ClassVar[bool] = True
    """Whether a push is the gradient of a batch: then differences of pushes measure the noise."""

    def __init__(self, side: Holder) -> None:
        self.side = side

    def counts(self, push: Push) -> bool:
        """Whether a push contributes to the mean."""
        return push.samples > 0

    def brings(self, push: Push) -> int:
        """The samples of a push that the lead counts: 0 if it takes part without a result."""
        return push.samples

    def shares(self, pushes: Sequence[Push]) -> list[np.float32]:
        """The weight of each push in the mean."""
        samples = sum(push.samples for push in pushes)
        return [np.float32(push.samples / samples) for push in pushes]

    def kept(self, delta: Delta) -> Any:
        """What of a push is held until the step is made."""
        return delta.dense(self.side.shard.size)

    def of(self, kept: Sequence[Any], shares: Sequence[np.float32]) -> Delta:
        """The mean of what was kept. shares: the weights, in the same order."""
        return Delta(_weighted_sum(kept, shares))

    def apply(self, mean: Delta, samples: int, norm: float | None) -> None:
        """Make the step. norm: of all shards, where it is clipped by that."""
        self.side.shard.apply(mean, samples, norm)


class SparseMean(Mean):
    """The mean by samples, of pushes that are held as received; it is as sparse as possible."""

    def kept(self, delta: Delta) -> Delta:
        return delta

    def of(self, kept: Sequence[Delta], shares: Sequence[np.float32]) -> Delta:
        return mean_of(kept, shares, self.side.shard.size)


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
    """int64[n]: the positions that are in any of these, ascending."""
    flags = np.zeros(size, bool)
    for where in indices:
        flags[where] = True
    return np.flatnonzero(flags)


def _weighted_sum(vectors: Sequence[Array], weights: Sequence[np.float32]) -> Array:
    """float32[n]; in the order of `vectors`, and in blocks that stay in the processor's cache."""
    total = np.zeros(vectors[0].size, np.float32)

    def add(lo: int, hi: int) -> None:
        for at in range(lo, hi, BLOCK):
            cut = slice(at, min(at + BLOCK, hi))
            into = total[cut]
            for vector, weight in zip(vectors, weights, strict=True):
                into += np.multiply(vector[cut], weight, out=scratch(into.size))

    threads.in_parts(total.size, add)
    return total
