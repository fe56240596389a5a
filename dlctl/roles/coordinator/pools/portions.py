"""Portions of a dataset of known length. `ClientPool`: of one that is cut into clients.

Every epoch of the dataset has the same portions, ranges of its shuffled order. A portion is leased,
then done. If its worker dies before that, the portion is returned and leased before all others. So
every sample is leased at least once per epoch, and exactly once if nothing fails.
"""

from __future__ import annotations

import math
from itertools import count
from typing import Any

from dlctl.algorithms.base import DataEpoch
from dlctl.job.clients import cohort
from dlctl.model.flat import slice_bounds
from dlctl.roles.coordinator.pools.data_pool import DONE, RETURNED, UNKNOWN, DataPool, Range
from dlctl.roles.coordinator.pools.holders import Key
from dlctl.wire.messages import Json


class PortionPool(DataPool):
    def __init__(self, samples: int, portion_samples: int, limit: float = math.inf) -> None:
        """samples: of the dataset. limit: portions that are leased in total."""
        super().__init__(portion_samples)
        self.samples = samples
        self.limit = limit
        self.done_count = 0
        self._next: Key = (0, 0)
        self._done: dict[int, set[int]] = {}
        """Data epoch -> its portions that are done."""
        self._complete: set[int] = set()
        """Data epochs of which all portions are done."""

    # ------------------------------------------------------------ how an epoch is cut

    @property
    def per_epoch(self) -> int:
        return -(-self.samples // self.portion_samples)

    def bounds(self, portion: int) -> tuple[int, int]:
        """The samples [start, stop) of a portion, in the order of any epoch."""
        return slice_bounds(self.samples, self.per_epoch, portion)

    def range(self, data_epoch: int, portion: int) -> Range:
        return Range(data_epoch, portion, *self.bounds(portion))

    def samples_before(self, portion: int) -> int:
        """Samples of the first `portion` portions of an epoch."""
        return self.bounds(portion)[0]

    def steps_before(self, portion: int, batch_size: int) -> int:
        """Steps of the first `portion` portions of an epoch. A dataset may have too many portions
        to iterate over, but they have only two lengths: counting each length is enough.
        """
        short = self.samples // self.per_epoch
        long_ones = self.samples_before(portion) - portion * short
        steps, long_steps = (-(-length // batch_size) for length in (short, short + 1))
        return (portion - long_ones) * steps + long_ones * long_steps

    # ------------------------------------------------------------ leases

    def take(self, slot: int, now: float) -> Range | None:
        return self.lease(self.holders.first_returned() or self.advance(), slot)

    def lease(self, key: Key | None, slot: int) -> Range | None:
        """Lease this portion; None: there is none."""
        if key is None:
            return None
        self.holders.lease(key, slot)
        return self.range(*key)

    def advance(self) -> Key | None:
        """The next portion that has never been leased; None: the limit is reached."""
        while True:
            epoch, index = key = self._next
            if epoch * self.per_epoch + index >= self.limit:
                return None
            self._next = (epoch, index + 1) if index + 1 < self.per_epoch else (epoch + 1, 0)
            if not self._is_done(key):
                return key

    def may_prefetch(self, slot: int, slots: int) -> bool:
        left = self.limit - self.done_count - len(self.holders.leased)
        return self.holders.count(slot) * slots <= left

    def finish(self, data_epoch: int, portion: int, now: float, end: int = UNKNOWN) -> bool:
        key = (data_epoch, portion)
        was_given = data_epoch >= 0 and 0 <= portion < self.per_epoch and key < self._next
        if self._is_done(key) or not was_given:
            return False
        self.holders.forget(key)
        self._mark(key)
        return True

    def on_end(self, slot: int, data_epoch: int, number: int, end: int) -> None:
        """Ignored: a dataset of known length has no such ends."""

    def check_end(self, data_epoch: int, portion: int, end: int) -> None:
        """Accept any end: a dataset of known length has no ends of shards."""

    # ------------------------------------------------------------ data epochs

    def standing(self, data_epoch: int) -> DataEpoch:
        """Progress of a data epoch."""
        left = self.limit - data_epoch * self.per_epoch
        portions = int(min(self.per_epoch, max(0, left)))
        under_way = self.holders.under_way(data_epoch)
        is_complete = data_epoch in self._complete
        done = portions if is_complete else len(self._done.get(data_epoch, ()))
        return DataEpoch(portions, portions - done - under_way.total(), under_way)

    def drop(self, before: int) -> None:
        """Count the unleased portions of the data epochs before this one as done."""
        dropped = {key for key in self.holders.returned if key[0] < before}
        while self._next[0] < before:
            epoch, index = self._next
            self._next = (epoch + 1, 0)
            last = self.standing(epoch).portions
            dropped.update((epoch, p) for p in range(index, last) if not self._is_done((epoch, p)))
        for key in sorted(dropped):
            self.holders.forget(key)
            self._mark(key)

    # ------------------------------------------------------------ figures

    def is_finished(self) -> bool:
        return self.done_count >= self.limit

    def epochs_done(self) -> float:
        return self.done_count / self.per_epoch

    def amount_done(self) -> str:
        return f"{self.epochs_done():.3g} epochs"

    def progress(self) -> float | None:
        return None if self.limit == math.inf else min(1.0, self.done_count / self.limit)

    def samples_leased(self) -> int:
        epoch, portion = self._next
        return epoch * self.samples + self.samples_before(portion)

    # ------------------------------------------------------------ persisted state

    @property
    def next(self) -> Key:
        return self._next

    def to_json(self) -> Json:
        """What is done, for a checkpoint: data epochs, and portions of the others."""
        portions = [[epoch, p] for epoch in sorted(self._done) for p in sorted(self._done[epoch])]
        return {
            "portion_samples": self.portion_samples, "dataset_samples": self.samples,
            "complete_epochs": sorted(self._complete), "portions": portions,
        }  # fmt: skip

    def restore(self, saved: Json) -> None:
        """Restore the pool. With another portion size only whole epochs are matched."""
        whole = set(saved["complete_epochs"])
        is_same = saved.get("portion_samples") == self.portion_samples
        keys = [(epoch, -1) for epoch in saved["complete_epochs"]]
        keys += [(epoch, p) for epoch, p in (saved["portions"] if is_same else ())]
        first = next(epoch for epoch in count() if epoch not in whole)
        self.resume((first, 0), dict.fromkeys(keys, DONE))
        self.changed |= dict.fromkeys(keys)

    def standing_of(self, data_epoch: int, portion: int) -> int | None:
        """The portions of a complete epoch are None; (epoch, -1, DONE) stands for all of them."""
        if data_epoch in self._complete:
            return DONE if portion < 0 else None
        if self._is_done((data_epoch, portion)):
            return DONE
        return self.holders.leased.get((data_epoch, portion), RETURNED)

    def resume(self, next_: Key, standing: dict[Key, Any]) -> None:
        self._next = next_
        for (epoch, portion), slot in standing.items():
            if portion < 0:
                self._complete.add(epoch)
                self.done_count += self.per_epoch
            elif slot == DONE:
                self._mark((epoch, portion))
        self.recall_holders(standing)
        self.changed.clear()

    def _is_done(self, key: Key) -> bool:
        return key[0] in self._complete or key[1] in self._done.get(key[0], ())

    def _mark(self, key: Key) -> None:
        of_epoch = self._done.setdefault(key[0], set())
        of_epoch.add(key[1])
        self.done_count += 1
        self.changed[key] = None
        if len(of_epoch) == self.per_epoch:
            del self._done[key[0]]
            self._complete.add(key[0])
            self.changed |= dict.fromkeys((key[0], p) for p in range(-1, self.per_epoch))


class ClientPool(PortionPool):
    """The data of a run with clients: a data epoch is a sample of them, and a portion is a client.

    If each worker has its own clients, no other worker trains them: if a slot's turn draws the
    client of another slot, that portion waits like a returned one.
    """

    def __init__(
        self, samples: int, clients: int, *, sizes: tuple[int, ...], passes: int, seed: int,
        owners: int,
    ) -> None:  # fmt: skip
        """samples, clients: of a data epoch, the samples on average. sizes: samples of each client.
        owners: number of workers that the clients are divided among; 0: not divided.
        """
        super().__init__(samples, clients)
        self.sizes = sizes
        self.passes = passes
        self.seed = seed
        self.owners = owners

    @property
    def per_epoch(self) -> int:
        return self.portion_samples

    def client(self, data_epoch: int, portion: int) -> int:
        drawn = cohort(self.seed, data_epoch, len(self.sizes), self.per_epoch)
        return int(drawn[portion])

    def bounds(self, portion: int) -> tuple[int, int]:
        """An upper bound of the samples of a portion of any epoch."""
        return 0, max(self.sizes) * self.passes

    def range(self, data_epoch: int, portion: int) -> Range:
        client = self.client(data_epoch, portion)
        return Range(data_epoch, portion, 0, self.sizes[client] * self.passes, client)

    def samples_before(self, portion: int) -> int:
        """The samples before a portion, by the mean of the clients, which differ in size."""
        return portion * self.samples // self.per_epoch

    def may_prefetch(self, slot: int, slots: int) -> bool:
        """Whether `slot` has at most its share of the newest data epoch's remaining portions."""
        if self.owners:
            return True
        newest = self.standing(self.next[0])
        return newest.under_way.get(slot, 0) * slots <= newest.left

    def take(self, slot: int, now: float) -> Range | None:
        """The first portion that `slot` has the data of; one of the next data epoch only if every
        portion of this epoch has been leased.
        """
        if not self.owners:
            return super().take(slot, now)
        mine = (key for key in self.holders.returned if self._is_of(key, slot))
        if (key := next(mine, None)) is not None:
            return self.lease(key, slot)
        oldest = self.holders.first_returned()
        while oldest is None or self.next[0] <= oldest[0]:
            following = self.advance()
            if following is None or self._is_of(following, slot):
                return self.lease(following, slot)
            self.holders.put_last(following)
            oldest = oldest or following
        return None

    def _is_of(self, key: Key, slot: int) -> bool:
        return self.client(*key) % self.owners == slot
