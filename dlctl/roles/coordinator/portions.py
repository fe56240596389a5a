"""Portions: the pieces of a dataset that are leased to workers. `streams.py` handles a dataset of
unknown length, `ClientPool` one that is cut into clients.

Every epoch of the dataset has the same portions, ranges of its shuffled order. A portion is leased,
then done. If its worker dies before that, the portion is returned and leased before all others. So
every sample is leased at least once per epoch, and exactly once if nothing fails.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from dlctl.algorithms.base import DataEpoch
from dlctl.clients import cohort
from dlctl.flat import slice_bounds
from dlctl.messages import Json

Key = tuple[int, int]
"""A portion: data epoch and number."""
RETURNED, DONE = -2, -1
"""In place of a slot: the portion waits to be leased again; it is done."""


class Range(NamedTuple):
    """A portion: samples [start, stop) in the shuffled order of `data_epoch`."""

    data_epoch: int
    portion: int
    start: int
    stop: int
    shard: int = -1
    """Number of the stream's shard or of the client, or -1. The samples are then those of the shard
    in its own order, or those of the client over all its passes."""


@dataclass(slots=True)
class Leases:
    """Which slot has which portion."""

    _returned: list[Key] = field(init=False, default_factory=list)
    _leased: dict[Key, int] = field(init=False, default_factory=dict)
    """Portion -> the slot that has it."""
    _copies: dict[Key, int] = field(init=False, default_factory=dict)
    """Leased portion -> the slot that has a backup copy of it. Not persisted: after a restart of
    the coordinator any worker's result is accepted."""
    _doubtful: set[Key] = field(init=False, default_factory=set)
    """Leased or returned according to a predecessor's records, which may be stale, or taken back
    from a live worker: another slot may have them, or they may be done."""
    _changed: dict[Key, None] = field(init=False, default_factory=dict)
    """Portions whose state has changed, in order."""

    def release(self, slot: int) -> list[Key]:
        """The worker of `slot` is gone: its unfinished portions are returned, unless another slot
        has a copy, which becomes the lease.
        """
        self._copies = {key: owner for key, owner in self._copies.items() if owner != slot}
        mine = [key for key, owner in self._leased.items() if owner == slot]
        back = sorted(key for key in mine if key not in self._copies)
        for key in mine:
            del self._leased[key]
            self._changed[key] = None
            if key in self._copies:
                self._leased[key] = self._copies.pop(key)
        self._returned = sorted(self._returned + back)
        return back

    def doubt(self, slot: int) -> list[Key]:
        """The worker of `slot` is alive and does not work on the portions leased to it. They are
        returned, but any worker's report that they are done is accepted.
        """
        back = self.release(slot) if slot in self._leased.values() else []
        self._doubtful.update(back)
        return back

    def may_finish(self, slot: int, data_epoch: int, portion: int) -> bool:
        """Whether `slot` may report a portion done: it has it, or the owner is uncertain."""
        key = (data_epoch, portion)
        having = (self._leased.get(key), self._copies.get(key))
        return key in self._doubtful or slot in having

    def without_copy(self, slot: int) -> list[Key]:
        """Leased portions that `slot` could take a backup copy of; [] if it has its own work."""
        if slot in self._leased.values() or slot in self._copies.values():
            return []
        return [key for key in self._leased if key not in self._copies]

    def is_copied(self, key: Key) -> bool:
        return key in self._copies

    def _lease(self, key: Key, slot: int) -> None:
        self._leased[key] = slot
        self._doubtful.discard(key)
        self._changed[key] = None

    def _resume(self, standing: dict[Key, int]) -> None:
        """Rebuild the state from the records of portions: their slots, RETURNED or DONE."""
        self._returned = sorted(key for key, slot in standing.items() if slot == RETURNED)
        self._leased = {key: slot for key, slot in standing.items() if slot >= 0}
        self._doubtful = {*self._leased, *self._returned}
        self._changed = {}

    def _forget(self, key: Key) -> None:
        """Remove a portion: no slot has it, and it is not leased again."""
        self._leased.pop(key, None)
        self._copies.pop(key, None)
        self._doubtful.discard(key)
        if key in self._returned:
            self._returned.remove(key)


@dataclass(slots=True)
class PortionPool(Leases):
    samples: int
    """Of the dataset."""
    portion_samples: int
    """At most so many in a portion."""
    limit: float = math.inf
    """Portions that are leased in total."""
    next: Key = (0, 0)
    """The first portion in order that has never been leased."""
    _done: dict[int, set[int]] = field(default_factory=dict)
    """Data epoch -> its portions that are done."""
    _complete: set[int] = field(default_factory=set)
    """Data epochs of which all portions are done."""
    done_count: int = 0

    @property
    def per_epoch(self) -> int:
        return -(-self.samples // self.portion_samples)

    def take(self, slot: int) -> Range | None:
        """Lease the next portion; None if none is free now (some may still be returned)."""
        key = self._pick(slot)
        if key is None:
            return None
        self._lease(key, slot)
        return self._range(*key)

    def copy(self, slot: int, key: Key) -> Range:
        """Lease a backup copy of a portion that another slot has."""
        self._copies[key] = slot
        return self._range(*key)

    def _pick(self, slot: int) -> Key | None:
        return self._returned.pop(0) if self._returned else self._advance()

    def _range(self, epoch: int, index: int) -> Range:
        return Range(epoch, index, *self.bounds(index))

    def may_hoard(self, slot: int, slots: int) -> bool:
        """Whether `slot` may prefetch one more portion: it has at most its share of what is left.

        slots: number of workers that share the rest.
        """
        held = sum(owner == slot for owner in self._leased.values())
        left = self.limit - self.done_count - len(self._leased)
        return held * slots <= left

    def bounds(self, portion: int) -> tuple[int, int]:
        """The samples [start, stop) of a portion, in the order of any epoch."""
        return slice_bounds(self.samples, self.per_epoch, portion)

    def samples_before(self, portion: int) -> int:
        """Samples of the first `portion` portions of an epoch."""
        return self.bounds(portion)[0]

    def samples_leased(self) -> int:
        """Samples of all portions that have ever been leased."""
        epoch, portion = self.next
        return epoch * self.samples + self.samples_before(portion)

    def steps_before(self, portion: int, batch_size: int) -> int:
        """Steps of the first `portion` portions of an epoch. A dataset may have too many portions
        to iterate over, but they have only two lengths: counting each length is enough.
        """
        short = self.samples // self.per_epoch
        long_ones = self.samples_before(portion) - portion * short
        steps, long_steps = (-(-length // batch_size) for length in (short, short + 1))
        return (portion - long_ones) * steps + long_ones * long_steps

    def finish(self, data_epoch: int, portion: int, end: int = -1) -> bool:
        """A portion is done. False if it was done before, or was never leased. end: of streams."""
        key = (data_epoch, portion)
        was_given = data_epoch >= 0 and 0 <= portion < self.per_epoch and key < self.next
        if self._is_done(key) or not was_given:
            return False
        self._forget(key)
        self._mark(key)
        return True

    def is_finished(self) -> bool:
        """Whether every portion up to the limit is done."""
        return self.done_count >= self.limit

    def epochs_done(self) -> float:
        return self.done_count / self.per_epoch

    def progress(self) -> float | None:
        """Progress of the run, 0..1; None without a limit."""
        return None if self.limit == math.inf else min(1.0, self.done_count / self.limit)

    def to_json(self) -> Json:
        """What is done, for a checkpoint: data epochs, and portions of the others."""
        portions = [[epoch, p] for epoch in sorted(self._done) for p in sorted(self._done[epoch])]
        complete = sorted(self._complete)
        return {
            "dataset_samples": self.samples, "complete_epochs": complete, "portions": portions,
        }  # fmt: skip

    def restore(self, complete_epochs: list[int], done: list[list[int]]) -> None:
        """Resume from a checkpoint: these are done, everything else is leased (again)."""
        keys = [*((epoch, -1) for epoch in complete_epochs), *((epoch, p) for epoch, p in done)]
        whole = set(complete_epochs)
        first = next(epoch for epoch in count() if epoch not in whole)
        self.go_on((first, 0), dict.fromkeys(keys, DONE))
        self._changed = dict.fromkeys(keys)

    def standing(self, data_epoch: int) -> DataEpoch:
        """Progress of a data epoch."""
        left = self.limit - data_epoch * self.per_epoch
        portions = int(min(self.per_epoch, max(0, left)))
        under_way = Counter(owner for key, owner in self._leased.items() if key[0] == data_epoch)
        is_complete = data_epoch in self._complete
        done = portions if is_complete else len(self._done.get(data_epoch, ()))
        return DataEpoch(portions, portions - done - under_way.total(), under_way)

    def drop(self, before: int) -> None:
        """Count the unleased portions of the data epochs before this one as done."""
        dropped = {key for key in self._returned if key[0] < before}
        while self.next[0] < before:
            epoch, index = self.next
            self.next = (epoch + 1, 0)
            last = self.standing(epoch).portions
            dropped.update((epoch, p) for p in range(index, last) if not self._is_done((epoch, p)))
        for key in sorted(dropped):
            self._forget(key)
            self._mark(key)

    def take_changes(self) -> list[tuple[int, int, int | None]]:
        """[(data epoch, portion, its slot or RETURNED or DONE)] since the last call.

        The portions of a complete epoch are None; (epoch, -1, DONE) stands for all of them.
        """
        changed, self._changed = list(self._changed), {}
        return [(*key, self._standing(*key)) for key in changed]

    def _standing(self, epoch: int, portion: int) -> int | None:
        if epoch in self._complete:
            return DONE if portion < 0 else None
        if self._is_done((epoch, portion)):
            return DONE
        return self._leased.get((epoch, portion), RETURNED)

    def go_on(self, next_: Key, standing: dict[Key, int]) -> None:
        """Rebuild the state from all that `take_changes` returned; `standing`: what is not None."""
        self.next = next_
        for (epoch, portion), slot in standing.items():
            if portion < 0:
                self._complete.add(epoch)
                self.done_count += self.per_epoch
            elif slot == DONE:
                self._mark((epoch, portion))
        self._resume(standing)

    def _advance(self) -> Key | None:
        while True:
            epoch, index = key = self.next
            if epoch * self.per_epoch + index >= self.limit:
                return None
            self.next = (epoch, index + 1) if index + 1 < self.per_epoch else (epoch + 1, 0)
            if not self._is_done(key):
                return key

    def _is_done(self, key: Key) -> bool:
        return key[0] in self._complete or key[1] in self._done.get(key[0], ())

    def _mark(self, key: Key) -> None:
        of_epoch = self._done.setdefault(key[0], set())
        of_epoch.add(key[1])
        self.done_count += 1
        self._changed[key] = None
        if len(of_epoch) == self.per_epoch:
            del self._done[key[0]]
            self._complete.add(key[0])
            self._changed |= dict.fromkeys((key[0], p) for p in range(-1, self.per_epoch))


WEIGHT = 0.1
"""Of the newest portion in the running mean of the time per portion."""


class Lateness:
    """Finds the straggling portions of a batch; idle workers get backup copies of them (Dean et al.
    2012, section 4.2). The first result for a portion wins, on every shard independently.

    A portion is late once it takes longer than the mean time from a lease to its completion. An
    earlier copy would not finish first, and would keep its worker from the next batch.
    """

    def __init__(self) -> None:
        self._since: dict[Key, float] = {}
        """Leased portion -> when it was leased, or first checked."""
        self._usual_s: float | None = None
        """Mean time from a portion's lease to its completion; None: none is complete."""

    def leased(self, key: Key, now: float) -> None:
        self._since[key] = now

    def done(self, key: Key, now: float, *, copied: bool) -> None:
        """copied: leave its time out of the mean."""
        since = self._since.pop(key, None)
        if since is None or copied:
            return
        before = now - since if self._usual_s is None else self._usual_s
        self._usual_s = before + WEIGHT * (now - since - before)

    def first(self, keys: Iterable[Key], now: float) -> Key | None:
        """Of these leased portions, the oldest if it is late; None: none is."""
        oldest = min(keys, key=lambda key: self._since.setdefault(key, now), default=None)
        return oldest if oldest is not None and now >= self._due(oldest) else None

    def deadline(self, keys: Iterable[Key]) -> float | None:
        """When the next of these becomes late."""
        return min((self._due(key) for key in keys if key in self._since), default=None)

    def _due(self, key: Key) -> float:
        return math.inf if self._usual_s is None else self._since[key] + self._usual_s


@dataclass(slots=True, kw_only=True)
class ClientPool(PortionPool):
    """The data of a run with clients: a data epoch is a sample of them, and a portion is a client.

    If each worker has its own clients, no other worker trains them: if a slot's turn draws the
    client of another slot, that portion waits like a returned one.

    samples: of a data epoch, on average. portion_samples: its clients. sizes: samples of each
    client. owners: number of workers that the clients are divided among; 0: not divided.
    """

    sizes: tuple[int, ...]
    passes: int
    seed: int
    owners: int

    @property
    def per_epoch(self) -> int:
        return self.portion_samples

    def client(self, data_epoch: int, portion: int) -> int:
        drawn = cohort(self.seed, data_epoch, len(self.sizes), self.per_epoch)
        return int(drawn[portion])

    def bounds(self, portion: int) -> tuple[int, int]:
        """An upper bound for a portion of any epoch."""
        return 0, max(self.sizes) * self.passes

    def samples_before(self, portion: int) -> int:
        """On average."""
        return portion * self.samples // self.per_epoch

    def may_hoard(self, slot: int, slots: int) -> bool:
        """Whether `slot` has at most its share of the newest data epoch's remaining portions."""
        if self.owners:
            return True
        newest = self.standing(self.next[0])
        return newest.under_way.get(slot, 0) * slots <= newest.left

    def _pick(self, slot: int) -> tuple[int, int] | None:
        """The first portion that `slot` has the data of; one of the next data epoch only if every
        portion of this epoch has been leased.
        """
        if not self.owners:
            return self._returned.pop(0) if self._returned else self._advance()
        while True:
            for key in self._returned:
                if self.client(*key) % self.owners == slot:
                    self._returned.remove(key)
                    return key
            if self._returned and self.next[0] > self._returned[0][0]:
                return None
            following = self._advance()
            if following is None:
                return None
            self._returned.append(following)
            self._changed[following] = None

    def _range(self, epoch: int, index: int) -> Range:
        client = self.client(epoch, index)
        return Range(epoch, index, 0, self.sizes[client] * self.passes, client)
