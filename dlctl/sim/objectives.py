"""What the simulator trains, in numpy: a vector of parameters, rows of data, a loss.

Batches are cut exactly as the real loader cuts them: a portion is a range of the order
`default_rng([seed, data_epoch]).permutation(samples)`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from dlctl.model.flat import AVERAGED, CONSTANT, TRAINED, Layout, TensorEntry, slice_bounds
from dlctl.util import listing
from dlctl.wire.messages import Array, Json


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, and who computes it."""

    rows: Array
    """int64[n], numbers of samples."""
    slot: int
    term: int
    number: int
    """Gradients that this process has computed before."""


class Objective(Protocol):
    """What the model is, and its gradient."""

    samples: int
    layout: Layout

    def initial(self) -> Array:
        """float32[d]: the initial parameters, a new array."""
        ...

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        """(mean loss, float32[d] gradient of it). Raises JobFailed for an error of the task."""
        ...

    def averaged(self, before: Array, batch: Batch) -> Array:
        """Buffers after this batch, float64[n]."""
        ...

    def evaluate(self, w: Array) -> Json:
        """The metrics of an evaluation at w. Raises JobFailed for an error of the task."""
        ...


@runtime_checkable
class HasFrozen(Protocol):
    """A task whose model has frozen parameters."""

    def frozen(self, slot: int) -> list[bytes]:
        """What this slot's model() makes of them."""
        ...


def batch_rows(
    samples: int, seed: int, data_epoch: int, portion: tuple[int, int], batch: tuple[int, int]
) -> Array:
    """Rows of a batch: `portion` is [start, stop) in the epoch's order, `batch` (number, the most
    samples that a batch has).
    """
    order = _order(samples, seed, data_epoch)
    (start, stop), (number, size) = portion, batch
    lo, hi = slice_bounds(stop - start, -(-(stop - start) // size), number)
    return order[start + lo : start + hi]


def stream_rows(
    lengths: tuple[int, ...], shard: int, portion: tuple[int, int], batch: tuple[int, int]
) -> Array:
    """Rows of a batch of a shard of a stream, as `batch_rows` has it; the rows of all shards are
    numbered one shard after the other. Fewer if the shard, of so many samples, ends.
    """
    (start, stop), (number, size) = portion, batch
    lo, hi = slice_bounds(stop - start, -(-(stop - start) // size), number)
    begin = start + lo
    end = max(begin, min(start + hi, lengths[shard]))
    return np.arange(begin, end) + sum(lengths[:shard])


def shard_names(count: int) -> tuple[str, ...]:
    """The names of a stream's shards."""
    return tuple(f"part-{shard:03}" for shard in range(count))


@lru_cache(maxsize=256)
def listed(names: tuple[str, ...], slot: int) -> tuple[str, ...]:
    """These names as the worker of a slot lists them: each in another order."""
    return tuple(names[n] for n in np.random.default_rng(slot).permutation(len(names)))


def opened(names: tuple[str, ...], slot: int, number: int) -> int:
    """The shard, an index of `names`, that the worker of a slot reads as `number`."""
    found = listed(names, slot)
    return names.index(found[listing.numbers(found).index(number)])


@lru_cache(maxsize=256)
def _order(samples: int, seed: int, data_epoch: int) -> Array:
    order = np.random.default_rng([seed, data_epoch]).permutation(samples)
    order.flags.writeable = False
    return order


def layout_of(size: int, buffers: int = 0) -> Layout:
    """A model of one parameter "w" and perhaps one buffer "seen"."""
    entries = [TensorEntry("w", TRAINED, (size,), "float32")]
    if buffers:
        entries.append(TensorEntry("seen", AVERAGED, (buffers,), "float64"))
    return Layout(tuple(entries))


class LeastSquares:
    """Mean of (x w - y)^2 / 2 over the rows; y = x w* plus a little noise."""

    def __init__(
        self, samples: int = 256, size: int = 12, seed: int = 0, noise: float = 0.01
    ) -> None:
        rng = np.random.default_rng([seed, 1])
        self.samples = samples
        self.layout = layout_of(size)
        self.solution = rng.standard_normal(size)
        self.x = rng.standard_normal((samples, size))
        self.y = self.x @ self.solution + noise * rng.standard_normal(samples)

    def initial(self) -> Array:
        return np.zeros(self.layout.size(), np.float32)

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        x = self.x[batch.rows]
        error = x @ w.astype(np.float64) - self.y[batch.rows]
        return float(error @ error) / (2 * len(error)), (x.T @ error / len(error)).astype("f4")

    def rows(self, w: Array, batch: Batch) -> tuple[Array, Array]:
        """The inputs of the layer that it is, float64[n, a], and the loss's gradients at its
        outputs, float64[n, 1].
        """
        x = self.x[batch.rows]
        error = x @ w.astype(np.float64) - self.y[batch.rows]
        return x, error[:, None] / len(error)

    def averaged(self, before: Array, batch: Batch) -> Array:
        return before

    def evaluate(self, w: Array) -> Json:
        error = self.x @ w.astype(np.float64) - self.y
        return {"loss": float(error @ error) / (2 * self.samples)}


class WithFrozen(LeastSquares):
    """An objective with two frozen parameters, "base" of so many bytes and "table"; `others`: slots
    whose model() makes another "table".
    """

    def __init__(
        self, others: Collection[int] = (), samples: int = 256, base_bytes: int = 2000
    ) -> None:
        super().__init__(samples)
        self.base_bytes = base_bytes
        frozen = (
            TensorEntry("base", CONSTANT, (base_bytes // 2,), "bfloat16"),
            TensorEntry("table", CONSTANT, (2, 3), "int64"),
        )
        self.layout = Layout((*self.layout.entries, *frozen))
        self.others = others

    def frozen(self, slot: int) -> list[bytes]:
        table = bytes([slot + 1 if slot in self.others else 0]) * 48
        return [bytes(range(200)) * (self.base_bytes // 200), table]


class WithBuffers(LeastSquares):
    """An objective with a buffer of one number: 1 and how many samples this replica has seen."""

    def __init__(self, samples: int = 256, size: int = 12, seed: int = 0) -> None:
        super().__init__(samples, size, seed)
        self.layout = layout_of(size, buffers=1)

    def averaged(self, before: Array, batch: Batch) -> Array:
        return before + len(batch.rows)


class Logistic:
    """Logistic regression of two clouds of points; `evaluate` gives the accuracy."""

    def __init__(
        self, samples: int = 256, size: int = 10, seed: int = 0, distance: float = 2.0
    ) -> None:
        rng = np.random.default_rng([seed, 2])
        self.samples = samples
        self.layout = layout_of(size)
        self.y = rng.integers(0, 2, samples) * 2.0 - 1.0
        direction = rng.standard_normal(size)
        direction *= distance / np.linalg.norm(direction)
        self.x = rng.standard_normal((samples, size)) + np.outer(self.y, direction)

    def initial(self) -> Array:
        return np.zeros(self.layout.size(), np.float32)

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        x, y = self.x[batch.rows], self.y[batch.rows]
        margin = y * (x @ w.astype(np.float64))
        slope = -y / (1.0 + np.exp(np.minimum(margin, 500.0)))
        return float(np.logaddexp(0.0, -margin).mean()), (x.T @ slope / len(y)).astype("f4")

    def averaged(self, before: Array, batch: Batch) -> Array:
        return before

    def evaluate(self, w: Array) -> Json:
        correct = (self.x @ w.astype(np.float64)) * self.y > 0
        return {"accuracy": float(correct.mean())}


@dataclass
class Ledger:
    """Not a task but an account: every gradient adds exactly 1.0 to a cell of its own.

    With plain SGD at lr = 1 the final weights are the count of applications: a cell of 0 whose push
    was acknowledged is a loss, a cell of 2 is a push that was applied twice. Every shard has a
    whole account (`shards` must be the job's number of servers), so each is judged by itself.
    """

    shards: int = 1
    samples: int = 64
    cells: int = 512
    """Gradients that can be told apart, over all processes of a run."""
    layout: Layout = field(init=False)
    authors: dict[tuple[int, int, int], int] = field(init=False, default_factory=dict)
    """(slot, term, number of the gradient) -> its cell."""

    def __post_init__(self) -> None:
        self.layout = layout_of(self.shards * self.cells)

    def initial(self) -> Array:
        return np.zeros(self.layout.size(), np.float32)

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        author = (batch.slot, batch.term, batch.number)
        cell = self.authors.setdefault(author, len(self.authors))
        assert cell < self.cells, "the ledger is full: give it more cells"
        gradient = np.zeros(self.layout.size(), np.float32)
        gradient[self.places(cell)] = -1.0
        return 1.0, gradient

    def places(self, cell: int) -> Array:
        """int64[shards]: where a cell is in the model, in each account."""
        return np.arange(cell, self.layout.size(), self.cells)

    def averaged(self, before: Array, batch: Batch) -> Array:
        return before

    def evaluate(self, w: Array) -> Json:
        return {"applied": float(w.sum())}

    def by_shard(self, w: Array) -> Array:
        """float32[shards, cells]: what stands in each cell of each shard; -1 where the weights are
        unknown.
        """
        return np.where(np.isfinite(w), w, np.float32(-1)).reshape(self.shards, self.cells)

    def counts(self, w: Array) -> Array:
        """int64[shards, cells]: how often each gradient was applied on each shard; -1 where the
        weights are unknown.
        """
        return self.by_shard(w).round().astype(np.int64)


@dataclass
class TurnedLedger(Ledger):
    """A ledger whose accounts all differ: one in the place of another is noticed."""

    TURN: ClassVar[int] = 7

    def places(self, cell: int) -> Array:
        accounts = np.arange(self.shards)
        return accounts * self.cells + (cell + self.TURN * accounts) % self.cells


@dataclass
class StreamedLedger(Ledger):
    """A ledger whose dataset is a stream."""

    lengths: tuple[int, ...] = ()
    """The samples of each shard of the stream; `samples` means nothing."""
    names: tuple[str, ...] = ()
    """The names of the stream's shards; (): the usual ones."""
