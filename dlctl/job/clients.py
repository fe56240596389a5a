"""Clients: the assignment of samples to clients, in federated training.

A map-style dataset is partitioned into clients, each with its own rows. A data epoch has some of
the clients, drawn by its number (`cohort`); a portion is one client, which makes one or several
passes over its rows. The order of the rows does not depend on the worker that trains the client: it
follows from the seed, the data epoch, the client and the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
"""Row numbers of the dataset."""
_CUT, _COHORT, _ORDER = 1, 2, 3
"""Purposes of random numbers, beside the seed: each has its own stream."""


class Cohort(NamedTuple):
    """The clients of a data epoch."""

    clients: int
    passes: int = 1
    """Passes of each over its rows."""


def epoch_samples(sizes: Sequence[int], cohort: Cohort) -> int:
    """Mean number of samples of a data epoch, at least 1."""
    return max(1, round(sum(sizes) * cohort.clients / len(sizes) * cohort.passes))


def cohort(seed: int, data_epoch: int, clients: int, size: int) -> Rows:
    """The clients of a data epoch, ascending: all sets of `size` are equally likely."""
    if size >= clients:
        return np.arange(clients)
    drawn = np.random.default_rng([seed, data_epoch, _COHORT]).choice(clients, size, replace=False)
    return np.sort(drawn)


class Clients:
    """parts: the rows of each client. sizes: their numbers. digest: of all rows and sizes."""

    def __init__(self, parts: Sequence[Rows], *, seed: int, shuffle: bool) -> None:
        self.parts = parts
        self.sizes = tuple(len(part) for part in parts)
        self._seed, self._shuffle = seed, shuffle
        whole = np.concatenate([np.array(self.sizes, np.int64), *parts])
        self.digest = sha256(whole.tobytes()).hexdigest()

    def rows(self, data_epoch: int, client: int, start: int, stop: int) -> Rows:
        """The rows at [start, stop) of all the client's passes in a data epoch."""
        size = self.sizes[client]
        first, last = start // size, (stop - 1) // size
        passes = [self._pass(data_epoch, client, number) for number in range(first, last + 1)]
        return np.concatenate(passes)[start - first * size : stop - first * size]

    def _pass(self, data_epoch: int, client: int, number: int) -> Rows:
        part = self.parts[client]
        if not self._shuffle:
            return part
        seed = [self._seed, data_epoch, client, number, _ORDER]
        return np.random.default_rng(seed).permutation(part)


# ---------------------------------------------------------------- how a dataset is partitioned


def cut(
    samples: int,
    clients: int,
    kind: str,
    *,
    alpha: float,
    seed: int,
    labels: Callable[[], npt.NDArray[np.int64]],
) -> list[Rows]:
    """The rows of each client, ascending, at least one each; every row belongs to one client.

    kind: "iid", "shards" or "dirichlet" (`config.Data.partition`). labels: int64[samples], if they
    are needed. Raises ValueError for more clients than samples.
    """
    if clients > samples:
        raise ValueError(f"{clients} clients, and {samples} samples")
    rng = np.random.default_rng([seed, _CUT])
    if kind == "iid":
        parts = np.array_split(rng.permutation(samples), clients)
    elif kind == "shards":
        by_label = np.argsort(labels(), kind="stable")
        pieces = np.array_split(by_label, 2 * clients)
        pairs = rng.permutation(2 * clients).reshape(clients, 2)
        parts = [np.concatenate([pieces[a], pieces[b]]) for a, b in pairs]
    else:
        parts = _dirichlet(labels(), clients, alpha, rng)
    return [np.sort(part).astype(np.int64) for part in _none_empty(parts)]


def _dirichlet(
    labels: npt.NDArray[np.int64], clients: int, alpha: float, rng: np.random.Generator
) -> list[Rows]:
    """The clients' shares of each label are drawn."""
    pieces: list[list[Rows]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(rng.dirichlet(np.full(clients, alpha))) * len(rows)
        for mine, piece in zip(pieces, np.split(rows, ends[:-1].astype(np.int64)), strict=True):
            mine.append(piece)
    return [np.concatenate(mine) for mine in pieces]


def _none_empty(parts: Sequence[Rows]) -> list[Rows]:
    """A client without rows gets one from the client with most rows."""
    found = list(parts)
    for number, part in enumerate(found):
        if not len(part):
            most = max(range(len(found)), key=lambda n: len(found[n]))
            found[number], found[most] = found[most][:1], found[most][1:]
    return found
