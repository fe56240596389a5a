"""SparseLoCo. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025
(arXiv 2508.15706), Alg. 1.

DiLoCo whose replicas send only the largest entries of their outer gradients. The others remain for
later rounds, and decay each time:

    round t:  replica i:  theta_i = theta                     # fetched
                          H times: theta_i = inner(theta_i, grad(theta_i, next mini-batch))
                          e_i = beta e_i + (theta - theta_i)  # beta = error_decay
                          push Delta_i = Q(Top-k(e_i));  e_i = e_i - Delta_i
              shard:      theta = theta - eta mean_i(clip(Delta_i))

The compressor implements Q and Top-k, by default `topk-chunked`: 64 of 4,096 entries in 2 bits
each. The outer optimiser is always SGD, eta = 1: error feedback replaces a momentum. So an outer
step changes only the pushed entries, and a fetch transfers only these.

The mean is over all replicas, by their samples, as in the paper (`mean = "replicas"`); or, entry by
entry, over those that have sent it, as in the authors' code (`mean = "senders"`): larger steps. In
either case no replica outweighs the others: in each block of 4,096 elements its entries are scaled
down to the median of all replicas' norms there (for an even number the lower of the two in the
middle). In the authors' code a block is a matrix, here it is a range of a server's slice.

The mean of many replicas has far more entries than each of them has sent. With `density_down` the
servers sparsify the mean as replicas sparsify their pushes:

              shard:      E = E + mean_i(...);  theta = theta - eta Top-k(E);  E = E - Top-k(E)

which is not in the paper. At the end of a run, E is in its last checkpoint, and in no update.

Rounds, members and deaths are those of `local-sgd`. If a replica dies, its e_i and its round are
lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.base import Method, Needs, PushKind, ReplicaSide, Shape, Start
from dlctl.algorithms.means import SparseMean, mean_of
from dlctl.algorithms.methods import local_sgd
from dlctl.algorithms.rounds import Rounds
from dlctl.compress.base import Delta
from dlctl.job.config import Choice
from dlctl.job.settings import Live
from dlctl.optim.base import Optimizer
from dlctl.optim.pending import PENDING, THRESHOLD, Pending, bits_of, is_released
from dlctl.shards.history import PART
from dlctl.wire.messages import Array

BLOCK = 4096
"""Elements whose norm is compared between replicas."""


@dataclass(slots=True, kw_only=True)
class Options(local_sgd.Options):
    local_steps: Live[Annotated[int, Ge(1)]] = 30
    """Steps of a replica from one mean to the next, H; the paper tries 15 to 250."""
    error_decay: Annotated[float, Ge(0), Le(1)] = 0.95
    """Decay per round of the entries that were not sent, beta; 1: none."""
    mean: Literal["replicas", "senders"] = "replicas"
    """Divisor of an entry's sum: all replicas of the round, or those that have sent the entry."""
    clip: bool = True
    """Scale each block down to the median norm of the replicas."""
    density_down: Annotated[float, Ge(0), Le(1 / PART)] = 0.0
    """Largest fraction of the parameters that a round changes: the servers apply the largest
    elements of its mean, and store the others for later rounds, in one more vector. A fetch
    transfers only these; 0.1 is for ten replicas and more. 0: all of each mean, and a fetch
    transfers all parameters if more than an eighth of them changed."""


class Replica(ReplicaSide):
    options: Options

    @classmethod
    def one_push(cls, options: Options) -> PushKind:
        return PushKind(options.local_steps, is_displacement=True)

    def begin(self, start: Start) -> None:
        self.rounds = self.arrival = Rounds(self)

    def run(self) -> Needs:
        return local_sgd.averaged(self, self.rounds, self._end_round)

    def _end_round(self) -> bool:
        if self.has_residual():
            self.residual *= self.options.error_decay
        return self.rounds.end()


class Even(SparseMean):
    """The mean of sparse pushes, none of which outweighs the others."""

    def of(self, kept: Sequence[Delta], shares: Sequence[np.float32]) -> Delta:
        options, size = self.side.options, self.side.shard.size
        deltas = clipped(kept, size) if options.clip else kept
        return mean_of(deltas, shares, size, of_senders=options.mean == "senders")

    def apply(self, mean: Delta, samples: int, norm: float | None) -> None:
        shard, density = self.side.shard, self.side.options.density_down
        if not density:
            super().apply(mean, samples, norm)
            return
        most = max(1, int(density * shard.size))
        delta, threshold, changes = released(mean, shard.slots[PENDING], most)
        shard.apply(delta, samples, norm, {THRESHOLD: bits_of(threshold)}, changes)


class Shard(Barrier):
    @classmethod
    def optimizer(cls, options: Options, optimizer: Optimizer, workers: int) -> Optimizer:
        return Pending(optimizer) if options.density_down else optimizer


def released(mean: Delta, pending: Array, most: int) -> tuple[Delta, np.float32, Array | None]:
    """(the update, the threshold above which it and the pending elements are released, and the
    positions of these, int64[n <= most]; None: all of them).
    """
    fresh = mean.dense(pending.size)
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
    """Each delta with every block scaled down to the median norm of that block."""
    blocks = -(-size // BLOCK)
    norms = np.sqrt([_squares(delta, size, blocks) for delta in deltas])
    median = np.sort(norms, axis=0)[(len(deltas) - 1) // 2]
    factors = np.divide(median, norms, out=np.ones_like(norms), where=norms > median)
    return [_scaled(d, f.astype(np.float32), size) for d, f in zip(deltas, factors, strict=True)]


def _squares(delta: Delta, size: int, blocks: int) -> Array:
    """float64[blocks]: the sum of squares of a delta in each block."""
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
    mean=Even,
    optimizer=Choice(name="sgd", options={"lr": 1.0}),
    inner=Choice(name="adamw", options={"lr": 4e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}),
    compression=Choice(name="topk-chunked"),
    shape=Shape(optimizers=("sgd",), optimizers_why="error feedback replaces its momentum"),
)
