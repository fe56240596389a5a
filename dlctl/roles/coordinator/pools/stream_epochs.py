"""What is done of a stream: its data epochs, each a pass over all shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dlctl.roles.coordinator.pools.data_pool import DONE, UNKNOWN
from dlctl.roles.coordinator.pools.holders import Key
from dlctl.roles.coordinator.pools.stream_passes import Pass, PortionSizes, StreamShard

_COMPLETE, _FIRST_SHARD = -1, -2
"""Persisted in place of a portion's number: the whole data epoch; the state of shard 0 (of shard n:
_FIRST_SHARD - n).
"""
_NEW, _EMPTY = (0, 0, UNKNOWN, ()), (0, 0, 0, ())
"""A shard that nobody has read, and one without samples, as in a checkpoint."""


class StreamEpochs:
    def __init__(self, cut: PortionSizes, changed: dict[Key, None]) -> None:
        """changed: gets what has to be recorded again."""
        self.cut = cut
        self._changed = changed
        self.newest = 0
        """The newest data epoch."""
        self.samples_done = self.steps_done = 0
        self.open: dict[int, Pass] = {0: Pass(cut)}
        """The data epochs that are not complete."""
        self.complete: dict[int, tuple[int, int]] = {}
        """Data epoch -> its samples and steps."""
        self._complete_samples = 0
        """The sum of the samples of all complete data epochs."""

    def begin_next(self) -> None:
        self.newest += 1
        self.open[self.newest] = Pass(self.cut)

    # ------------------------------------------------------------ what is done

    def advance(self, number: int) -> Key | None:
        """The next portion of a shard in the newest data epoch; None if it was done before."""
        portion = self.open[self.newest].advance(number)
        self._shard_changed(self.newest, number)
        return None if portion is None else (self.newest, portion)

    def mark(self, epoch: int, portion: int) -> None:
        """A portion of an open data epoch is done."""
        shards = self.open[epoch]
        read = shards.length(portion)
        self.samples_done += read
        self.steps_done += self.cut.steps(read)
        self._changed |= dict.fromkeys((epoch, covered) for covered in shards.mark(portion))
        self._shard_changed(epoch, portion % self.cut.shards)
        self.close(epoch)

    def end_at(self, epoch: int, number: int, end: int) -> bool:
        """A shard has at most `end` samples; False if that is known. `close` follows."""
        is_news = self.open[epoch].end_at(number, end)
        if is_news:
            self._shard_changed(epoch, number)
        return is_news

    def _shard_changed(self, epoch: int, number: int) -> None:
        self._changed[epoch, _FIRST_SHARD - number] = None

    def close(self, epoch: int) -> None:
        """A data epoch of which all shards are complete is, too, unless it is empty: then the run
        fails.
        """
        shards = self.open[epoch]
        if shards.is_complete() and (counted := shards.counted())[0]:
            del self.open[epoch]
            self.complete[epoch] = counted
            self._complete_samples += counted[0]
            shards_too = range(-1, self.cut.shards)
            self._changed |= dict.fromkeys((epoch, _FIRST_SHARD - n) for n in shards_too)

    # ------------------------------------------------------------ figures

    def may_end_in(self, epoch: int, portion: int, end: int) -> bool:
        """Whether a shard with `end` samples ends in this portion. True also if the data epoch is
        complete: then it does not matter.
        """
        if epoch not in self.open:
            return True
        start, stop = self.open[epoch].bounds(portion)
        return start <= end <= stop

    def is_behind(self, key: Key) -> bool:
        """Whether a portion begins behind the end of its shard, or its data epoch is complete."""
        shards = self.open.get(key[0])
        return shards is None or shards.is_behind(key[1])

    def expect(self, keys: Iterable[Key]) -> None:
        """These portions are leased, or wait to be."""
        for epoch, portion in keys:
            if epoch in self.open:
                self.open[epoch].expect(portion)

    def with_outstanding(self) -> tuple[int, int]:
        """Samples and steps that are done or outstanding, if no shard ends earlier."""
        count, n = (
            sum(shards.outstanding for shards in self.open.values()),
            self.cut.portion_samples,
        )
        return self.samples_done + count * n, self.steps_done + count * self.cut.steps(n)

    def epochs_done(self) -> float:
        """Data epochs, with a fraction of the newest one if an earlier epoch's length is known."""
        if not self.complete:
            return 0.0
        per_epoch = self._complete_samples / len(self.complete)
        of_newest = (self.samples_done - self._complete_samples) / per_epoch
        return len(self.complete) + min(of_newest, 1.0)

    # ------------------------------------------------------------ persisted state

    def to_json(self, order: Sequence[int]) -> list[Any]:
        """The progress for a checkpoint: data epochs, and in the open ones the shards, in order."""
        complete = [[epoch, *counted] for epoch, counted in sorted(self.complete.items())]
        passes = [
            [epoch, [shards.shards[n].to_json() for n in order]]
            for epoch, shards in sorted(self.open.items())
        ]
        return [complete, passes]

    def standing_of(self, epoch: int, portion: int) -> Any:
        """The record of a whole data epoch or of a shard; None for a portion, and of a shard whose
        data epoch is complete.
        """
        if portion == _COMPLETE:
            return list(self.complete[epoch])
        if portion >= 0 or epoch not in self.open:
            return None
        shard = self.open[epoch].shards[_FIRST_SHARD - portion]
        return [shard.base, shard.next, shard.done_to, shard.end]

    def recall(self, newest: int, standing: dict[Key, Any]) -> dict[Key, int]:
        """What a predecessor's records say, to a new object. Returns the records of portions that
        are leased, returned, or done before earlier ones of their shards.
        """
        self.newest, self.open = newest, {newest: Pass(self.cut)}
        portions: dict[Key, int] = {}
        for (epoch, portion), known in standing.items():
            if portion == _COMPLETE:
                self.complete[epoch] = (known[0], known[1])
            elif portion < 0:
                shards = self.open.setdefault(epoch, Pass(self.cut))
                shards.set(_FIRST_SHARD - portion, StreamShard(*known))
            else:
                portions[epoch, portion] = known
        for epoch in self.complete:
            self.open.pop(epoch, None)
        stale = [key for key in portions if key[0] not in self.open]
        for key in stale:
            del portions[key]
        self._count({key for key, slot in portions.items() if slot == DONE})
        self._changed.clear()
        self._changed |= dict.fromkeys(stale)
        return portions

    def _count(self, done_ahead: set[Key]) -> None:
        for epoch, portion in done_ahead:
            shard, index = self.open[epoch].place(portion)
            shard.done.add(index)
        self._complete_samples = sum(samples for samples, _ in self.complete.values())
        self.samples_done = self._complete_samples
        self.steps_done = sum(steps for _, steps in self.complete.values())
        for epoch, shards in list(self.open.items()):
            samples, steps = shards.counted()
            self.samples_done += samples
            self.steps_done += steps
            self.close(epoch)

    def saved(self, saved: list[Any], before: int, order: Sequence[int]) -> dict[Key, Any]:
        """A checkpoint as records. before: samples in its portions. If that has changed, samples
        done behind the first gap of a shard are done again. The last shards of `order` may be new
        since: the newest data epoch has them, too.
        """
        complete, passes = saved
        standing: dict[Key, Any] = {(epoch, _COMPLETE): counted for epoch, *counted in complete}
        newest = max((epoch for epoch, *_ in (*complete, *passes)), default=0)
        for epoch, shards in passes:
            new = _EMPTY if epoch < newest else _NEW
            rows = [*shards, *[new] * (self.cut.shards - len(shards))]
            for n, (base, done_to, end, done) in zip(order, rows, strict=True):
                row = [base, done_to, done_to, end]
                if before != self.cut.portion_samples:
                    begin = base + done_to * before
                    row, done = [begin if end == UNKNOWN else min(begin, end), 0, 0, end], []
                standing[epoch, _FIRST_SHARD - n] = row
                standing |= dict.fromkeys(((epoch, i * self.cut.shards + n) for i in done), DONE)
        return standing

    def lease_rest(self) -> list[Key]:
        """The unfinished portions of all data epochs but the newest, which count as leased."""
        older = sorted(self.open.keys() - {self.newest})
        return [(epoch, portion) for epoch in older for portion in self.open[epoch].lease_rest()]

    def completed(self) -> list[Key]:
        """The keys of the records of complete data epochs."""
        return [(epoch, _COMPLETE) for epoch in self.complete]
