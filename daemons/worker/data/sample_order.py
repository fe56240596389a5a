"""Which samples a data epoch has, and in which order: the same in every worker.

By default it is a random order of all samples, which depends on the seed and the data epoch, or the
dataset's own order without a shuffle. A task may have a `sampler(dataset, epoch)` that returns the
order, or `sample_weights(dataset)`, by which an epoch draws as many samples as there are, with
replacement. Each may also be what it would return: a torch Sampler, or the weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from daemons.worker.replica import generators_kept, seed_of
from daemons.worker.task.user_task import Task, TaskError, is_stream

Rows = npt.NDArray[np.int64]
"""Indices of samples in the dataset."""
Draw = Callable[[int], Rows]
"""Data epoch -> its whole order."""
SHUFFLED_MAX = 2**32
"""Samples: every worker creates the whole order at once, 4 bytes for each."""
ORDERS_KEPT = 2
"""Around the end of a data epoch, portions of two epochs are leased."""


class SampleOrder:
    """length: samples of an epoch, the same for all epochs. digest: of the task's order, to compare
    workers; "": the task does not choose one.
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool, draw: Draw | None = None) -> None:
        """size: samples of the dataset. draw: the task's own order. Raises TaskError."""
        self._is_plain = draw is None and not shuffle
        made: Callable[[int], npt.NDArray[Any]] = draw or partial(_shuffled, size, seed)
        self._whole = lru_cache(ORDERS_KEPT)(made)
        if shuffle and draw is None and size > SHUFFLED_MAX:
            raise TaskError(
                f"task.dataset() has {size} samples; at most {SHUFFLED_MAX} can be shuffled",
                hint="set data.shuffle = false, or make it a stream that shuffles on its own",
            )
        self.length, self.digest = size, ""
        if draw is not None:
            first = self._whole(0)
            self.length, self.digest = len(first), sha256(first.tobytes()).hexdigest()

    def rows(self, data_epoch: int, start: int, stop: int) -> Rows:
        """The samples at [start, stop) of the order of a data epoch. Raises TaskError."""
        if self._is_plain:
            return np.arange(start, stop)
        return self._whole(data_epoch)[start:stop].astype(np.int64, copy=False)


def _shuffled(size: int, seed: int, data_epoch: int) -> npt.NDArray[np.uint32]:
    rows = np.arange(size, dtype=np.uint32)
    np.random.default_rng([seed, data_epoch]).shuffle(rows)  # In place: it may be large.
    return rows


def chosen_by(task: Task, dataset: Any, seed: int) -> Draw | None:
    """The task's own order; None: it has none. Raises TaskError."""
    chosen = [part for part in ("sampler", "sample_weights") if task.has(part)]
    if not chosen:
        return None
    if is_stream(dataset):
        raise TaskError(
            f"the task has {chosen[0]}(), but its dataset is a stream, which has an order of its "
            "own",
            where=task.place(chosen[0]),
            hint="remove it, or return a dataset with __len__ and __getitem__",
        )
    if len(chosen) > 1:
        raise TaskError(
            "the task has both sampler() and sample_weights()",
            where=task.place("sample_weights"),
            hint="keep one: a sampler may draw by weights itself",
        )
    if chosen == ["sampler"]:
        return _Sampler(task, dataset, seed)
    return _Weighted(task.sample_weights(dataset), seed)


class _Sampler:
    def __init__(self, task: Task, dataset: Any, seed: int) -> None:
        self._task, self._dataset, self._seed = task, dataset, seed
        self._length: int | None = None

    def __call__(self, data_epoch: int) -> Rows:
        rows = self._drawn(data_epoch)
        if self._length is None:
            self._length = len(rows)
            if not np.array_equal(rows, self._drawn(data_epoch)):
                raise TaskError(
                    f"task.sampler has another order when it is asked for epoch {data_epoch} "
                    "again, so a worker that replaces another would have other samples",
                    where=self._task.place("sampler"),
                    hint="draw from the generators of torch, numpy or random, which are seeded for "
                    "each epoch, or from one that is made of the epoch; a torch Sampler may have "
                    "set_epoch(epoch)",
                )
        if len(rows) != self._length:
            raise TaskError(
                f"task.sampler returned {len(rows)} samples for epoch {data_epoch}, but "
                f"{self._length} for epoch 0",
                where=self._task.place("sampler"),
                hint="every epoch must have the same number: dlctl leases ranges of them",
            )
        return rows

    def _drawn(self, data_epoch: int) -> Rows:
        seed = seed_of(self._seed, data_epoch)  # So every worker draws the same.
        with generators_kept():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            return self._task.sampler(self._dataset, data_epoch, seed)


class _Weighted:
    def __init__(self, weights: npt.NDArray[np.float64], seed: int) -> None:
        ends = np.cumsum(weights)
        self._ends, self._seed = ends / ends[-1], seed

    def __call__(self, data_epoch: int) -> Rows:
        drawn = np.random.default_rng([self._seed, data_epoch]).random(len(self._ends))
        return np.searchsorted(self._ends, drawn, side="right")
