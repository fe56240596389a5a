"""Batches of a stream: a dataset that has no length and no samples by number, read in order.

A task's dataset() is a stream if it is an IterableDataset of torch, or if it has no `__len__` and
either `__iter__` or `shards` and `open`. There are three kinds:

    shards() -> names, or how many       has known shards with fast seeks: opened at sample `offset`
    open(shard, offset) -> samples       of a shard, which is a name, or a number from 0; a name is
                                         a text, a path, a number, or a tuple of these
    num_shards, shard(...), skip(n)      from `datasets` with streaming=True
    __iter__ alone                       one shard; every worker reads all of it, and skips what
                                         the other workers compute

It must return the same samples in the same order whenever a shard is opened; after
`set_epoch(epoch)`, if it has that, in the order of this epoch. A shuffle must be seeded. A worker
opens a shard once and reads sequentially. It skips what other workers compute, and reopens the
shard if an earlier portion is returned to it. On the wire shards are numbered by their sorted
names: shards() may list them in another order in every worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from daemons.worker.data.data_names import name_of
from daemons.worker.data.portion_loader import Batching, Collate, LoadedBatch, PortionLoader
from daemons.worker.task.user_task import TaskError, calling
from dlctl.util import listing

OPEN_MAX = 4
"""Shards that a worker keeps open: its own, and those of returned portions."""


class WantedBatch(NamedTuple):
    """A batch: up to `samples` of a shard, from `start` on."""

    data_epoch: int
    shard: int
    start: int
    samples: int


class StreamLoader(PortionLoader):
    """A PortionLoader of a stream; it reads in a single process if there are `processes`. `shuffle`
    has no effect. Raises TaskError if the stream does not define its shards.
    """

    def _guard(
        self, dataset: Any, collate: Collate | None, place: str | None, tolerant: bool
    ) -> tuple[Batching, int]:
        stream = _Stream(dataset, place)
        self.shards, self.names = stream.shards, stream.names
        return _Guarded(stream, collate, place), 0  # The length is unknown.

    def _with(self, processes: int) -> DataLoader[Any]:
        return super()._with(1)  # One process reads a shard, in order.

    def _wanted(
        self, data_epoch: int, start: int, stop: int, shard: int, bounds: list[tuple[int, int]]
    ) -> list[Any]:
        return [WantedBatch(data_epoch, shard, start + lo, hi - lo) for lo, hi in bounds]


class _Guarded(Batching):
    """The stream, with errors as values. It runs in the loader process, if there is one, and its
    shards stay open from one portion to the next.
    """

    def __init__(self, stream: _Stream, collate: Collate | None, place: str | None) -> None:
        super().__init__(collate, place)
        self._stream = stream

    def _made(self, wanted: WantedBatch) -> LoadedBatch:
        samples = self._stream.read(wanted)
        if not samples:
            return LoadedBatch(None, 0)
        with calling("making a batch of samples", self._place):
            return LoadedBatch(self._collate(samples), len(samples))


class _Open:
    """A shard that is being read."""

    def __init__(self, samples: Iterator[Any], at: int) -> None:
        self.samples = samples
        self.at = at
        """Samples read or skipped so far."""
        self.has_ended = False

    def read(self, count: int) -> list[Any]:
        """The next `count` samples; fewer if the shard ends."""
        found = [] if self.has_ended else list(islice(self.samples, count))
        self.at += len(found)
        self.has_ended |= len(found) < count
        return found

    def skip(self, count: int) -> None:
        skipped = 0 if self.has_ended else sum(1 for _ in islice(self.samples, count))
        self.at += skipped
        self.has_ended |= skipped < count


class _Stream:
    """The task's dataset, whatever kind of stream it is."""

    def __init__(self, dataset: Any, place: str | None) -> None:
        self._dataset = dataset
        self._place = place
        self._epoch: int | None = None
        self._open: dict[tuple[int, int], _Open] = {}
        self._named: list[Any] | None = None
        """The shards by their numbers, as the dataset's `open` wants them; None: it lists none."""
        self.names = ""
        """The names of the shards in the order of the dataset's list, one a line; "": they have
        only numbers.
        """
        self.shards = self._count()

    def read(self, wanted: WantedBatch) -> list[Any]:
        """The samples of a batch, fewer if the shard ends. Raises TaskError."""
        key = (wanted.data_epoch, wanted.shard)
        what = "reading task.dataset()"
        if self.shards > 1:
            what += f", shard {self._named[wanted.shard] if self._named else wanted.shard}"
        try:
            with calling(f"{what}, from sample {wanted.start}", self._place):
                shard = self._at(key, wanted.start)
                return shard.read(wanted.samples)
        except BaseException:
            self._open.pop(key, None)  # A generator that has raised an error has ended.
            raise

    def _at(self, key: tuple[int, int], start: int) -> _Open:
        """The shard, open at sample `start`, if it has so many."""
        shard = self._open.pop(key, None)
        is_here = shard is not None and (
            shard.at == start or (shard.has_ended and shard.at < start)
        )
        if shard is None or (not is_here and (shard.at > start or self._named is not None)):
            shard = self._opened(*key, start)
        elif not is_here:
            shard.skip(start - shard.at)
        self._open[key] = shard
        while len(self._open) > OPEN_MAX:
            del self._open[next(iter(self._open))]
        return shard

    def _opened(self, epoch: int, number: int, start: int) -> _Open:
        if epoch != self._epoch:
            self._epoch = epoch
            _set_epoch(self._dataset, epoch)
        if self._named is not None:
            return _Open(iter(self._dataset.open(self._named[number], start)), start)
        part = self._dataset
        if self.shards > 1:
            part = part.shard(num_shards=self.shards, index=number)
        skips = start > 0 and callable(getattr(part, "skip", None))
        part = part.skip(start) if skips else part
        if part is not self._dataset:
            _set_epoch(part, epoch)  # `datasets` does not pass it on.
        if skips:
            return _Open(iter(part), start)
        found = _Open(iter(part), 0)
        found.skip(start)
        return found

    def _count(self) -> int:
        if callable(getattr(self._dataset, "shards", None)):
            with calling("task.dataset().shards", self._place):
                given = self._dataset.shards()
                is_count = isinstance(given, int)
                given = range(given) if is_count else given
                listed = [given] if isinstance(given, str) else list(given)
            if not callable(getattr(self._dataset, "open", None)):
                raise self._wrong("has shards() but no open(shard, offset)")
            if not listed:
                raise self._wrong("has no shards: shards() returns none")
            self._named = listed if is_count else self._by_name(listed)
            return len(listed)
        if callable(getattr(self._dataset, "shard", None)):
            return max(int(getattr(self._dataset, "num_shards", 1)), 1)
        return 1

    def _by_name(self, listed: list[Any]) -> list[Any]:
        """The shards by their numbers."""
        try:
            names = [*listing.names([name_of(shard) for shard in listed])]
        except TypeError as error:
            raise self._wrong(f"has a shard without a name: {error}") from None
        self.names = listing.ROW.join(names)
        return [shard for _, shard in sorted(zip(listing.numbers(names), listed, strict=True))]

    def _wrong(self, text: str) -> TaskError:
        hint = (
            "shards() returns their names (text, paths, numbers, or tuples of these) or how many "
            "there are, open(shard, offset) the samples of one"
        )
        return TaskError(f"task.dataset() {text}", where=self._place, hint=hint)


def _set_epoch(dataset: Any, epoch: int) -> None:
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
