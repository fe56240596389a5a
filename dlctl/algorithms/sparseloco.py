"""SparseLoCo. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025
(arXiv 2508.15706), Alg. 1.

DiLoCo whose replicas send only the largest entries of their ways, and keep the others for later
rounds, each time a little less of them:

    round t:  replica i:  theta_i = theta                     # fetched
                          H times: theta_i = inner(theta_i, grad(theta_i, next mini-batch))
                          e_i = beta e_i + (theta - theta_i)  # beta = error_decay
                          push Delta_i = Q(Top-k(e_i));  e_i = e_i - Delta_i
              shard:      theta = theta - eta mean_i(clip(Delta_i))

What Q and Top-k are is the compressor's matter, `topk-chunked` unless the job file says otherwise:
64 of 4,096 entries in 2 bits each. The outer optimiser is SGD, eta = 1, and no other one: error
feedback is what takes the place of a momentum. So an outer step changes no more than what was
pushed, and a fetch brings only that.

The mean is over all replicas, by their samples, as in the paper (`mean = "replicas"`); or, entry by
entry, over those that have sent it, as in the authors' code (`mean = "senders"`): larger steps. In
either case no replica outweighs the others: of each block of 4,096 elements its entries are scaled
down to the median of all replicas' norms there (of an even number the lower one of the two in the
middle). In the authors' code a block is a matrix, here it is a range of a server's slice.

Of many replicas the mean has far more entries than each of them has sent. With `density_down` the
servers do on the way down what replicas do on the way up:

              shard:      E = E + mean_i(...);  theta = theta - eta Top-k(E);  E = E - Top-k(E)

which is not in the paper. What waits there at the end of a run is in its last checkpoint, and in no
update.

Rounds, members and deaths are those of `local-sgd`. What a dead replica has not sent, e_i, is lost
with it, as its round is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from dlctl.algorithms import local_sgd, sync
from dlctl.algorithms.base import Method, Shape, dense
from dlctl.algorithms.sparse import SparseSide, mean_of
from dlctl.compress.base import Delta
from dlctl.config import Choice
from dlctl.messages import Array
from dlctl.optim.base import Optimizer
from dlctl.optim.pending import PENDING, THRESHOLD, Pending, bits_of, is_released
from dlctl.shards.history import PART

BLOCK = 4096
"""Elements whose norm is compared between replicas."""


@dataclass(slots=True, kw_only=True)
class Options(local_sgd.Options):
    local_steps: Annotated[int, Ge(1)] = 30
    """Steps of a replica from one mean to the next, H; the paper tries 15 to 250. Changes live."""
    error_decay: Annotated[float, Ge(0), Le(1)] = 0.95
    """What stays from round to round of all that was not sent, beta; 1: all of it."""
    mean: Literal["replicas", "senders"] = "replicas"
    """Whom an entry is divided by: all replicas of the round, or those that have sent it."""
    clip: bool = True
    """Scale down what is longer than the median of the replicas, block by block."""
    density_down: Annotated[float, Ge(0), Le(1 / PART)] = 0.0
    """The part of the parameters that a round changes at most: of its mean the largest elements, in
    the servers; the others wait there for later rounds, in a vector more. A fetch brings no more
    than that; 0.1 is for ten replicas and more. 0: all of each mean, and a fetch brings everything
    if that is more than an eighth."""


class Replica(local_sgd.Replica):
    options: Options

    def _take_way(self) -> bool:
        if self.has_residual():
            self.residual *= self.options.error_decay
        return super()._take_way()


class Shard(SparseSide, sync.Barrier):
    """A barrier of sparse pushes, none of which outweighs the others."""

    options: Options

    def _mean_of(self, kept: Sequence[Delta], shares: Sequence[np.float32]) -> Delta:
        size = self.shard.size
        deltas = clipped(kept, size) if self.options.clip else kept
        return mean_of(deltas, shares, size, of_senders=self.options.mean == "senders")

    @classmethod
    def optimizer(cls, options: Options, optimizer: Optimizer, workers: int) -> Optimizer:
        return Pending(optimizer) if options.density_down else optimizer

    def _apply(self, mean: Delta, samples: int, norm: float | None) -> None:
        if not self.options.density_down:
            super()._apply(mean, samples, norm)
            return
        most = max(1, int(self.options.density_down * self.shard.size))
        delta, threshold, changes = released(mean, self.shard.slots[PENDING], most)
        self.shard.apply(delta, samples, norm, {THRESHOLD: bits_of(threshold)}, changes)


def released(mean: Delta, pending: Array, most: int) -> tuple[Delta, np.float32, Array | None]:
    """(the update, the threshold of what it releases of itself and of what is pending, and where
    that is, int64[n <= most]; None: all of it).
    """
    fresh = dense(mean, pending.size)
    total = pending + fresh
    size = np.abs(total)
    threshold = np.float32(0)
    if np.count_nonzero(size) > most:
        threshold = np.partition(size, size.size - most)[size.size - most]
        if np.count_nonzero(is_released(total, threshold)) > most:  # Several are of that size.
            threshold = np.nextafter(threshold, np.float32(np.inf))
        if not is_released(total, threshold).any():
            threshold = np.float32(0)
    goes = is_released(total, threshold) if threshold else total != 0
    where = np.flatnonzero(goes | (fresh != 0))
    return Delta(fresh[where], where), threshold, np.flatnonzero(goes) if threshold else None


def clipped(deltas: Sequence[Delta], size: int) -> list[Delta]:
    """Each delta with no block longer than the median of all in that place."""
    blocks = -(-size // BLOCK)
    norms = np.sqrt([_squares(delta, size, blocks) for delta in deltas])
    median = np.sort(norms, axis=0)[(len(deltas) - 1) // 2]
    factors = np.divide(median, norms, out=np.ones_like(norms), where=norms > median)
    return [_scaled(d, f.astype(np.float32), size) for d, f in zip(deltas, factors, strict=True)]


def _squares(delta: Delta, size: int, blocks: int) -> Array:
    """float64[blocks]"""
    squares = np.square(delta.values, dtype=np.float64)
    return np.bincount(_where_all(delta, size) // BLOCK, weights=squares, minlength=blocks)


def _scaled(delta: Delta, factors: Array, size: int) -> Delta:
    return Delta(delta.values * factors[_where_all(delta, size) // BLOCK], delta.indices)


def _where_all(delta: Delta, size: int) -> Array:
    return np.arange(size) if delta.indices is None else delta.indices


SPARSELOCO = Method(
    Options=Options,
    replica=Replica,
    shard=Shard,
    live=local_sgd.LIVE,
    optimizer=Choice(name="sgd", options={"lr": 1.0}),
    inner=Choice(name="adamw", options={"lr": 4e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}),
    compression=Choice(name="topk-chunked"),
    shape=Shape(
        optimizers=("sgd",), optimizers_why="error feedback takes the place of its momentum"
    ),
)
