"""The data of a method that the coordinator drives: a batch is a data epoch.

Idle workers get backup copies of the straggling portions of a batch (Dean et al. 2012, section
4.2). The first result for a portion wins, on every shard independently. A portion is late once it
takes longer than the mean time from a lease to its completion. An earlier copy would not finish
first, and would keep its worker from the next batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any

from dlctl.roles.coordinator.pools.data_pool import UNKNOWN, Range
from dlctl.roles.coordinator.pools.holders import Key
from dlctl.roles.coordinator.pools.portions import PortionPool

WEIGHT = 0.1
"""The weight of the newest portion in the running mean of the time per portion."""


class BatchPool(PortionPool):
    """A pool in which each batch of a driven method is a data epoch. Between two batches, and while
    the last portions of a batch are leased, workers are left waiting: so the next batch, or a dead
    worker's portions, start at once.
    """

    keeps_waiting = True

    def __init__(self, samples: int, portion_samples: int, limit: float = math.inf) -> None:
        super().__init__(samples, portion_samples, limit)
        self._lateness = Lateness()

    def take(self, slot: int, now: float) -> Range | None:
        taken = super().take(slot, now)
        if taken is not None:
            self._lateness.leased((taken.data_epoch, taken.portion), now)
        return taken

    def backup(self, slot: int, now: float) -> Range | None:
        if not self.holders.is_idle(slot):
            return None
        late = self._lateness.first(self._is_alone, now)
        if late is None:
            return None
        self.holders.copy(late, slot)
        return self.range(*late)

    def backup_due(self) -> float | None:
        return self._lateness.deadline(self._is_alone)

    def is_dry(self, now: float) -> bool:
        return not self._has_portion() and not self._lateness.may_have(self._is_alone, now)

    def able(self) -> list[int]:
        return super().able() if self._has_portion() else self.idle()

    def finish(self, data_epoch: int, portion: int, now: float, end: int = UNKNOWN) -> bool:
        key = data_epoch, portion
        self._lateness.done(key, now, copied=self.holders.is_copied(key))
        return super().finish(data_epoch, portion, now, end)

    def give_back(self, slot: int, *, lives: bool = False) -> list[Key]:
        back = super().give_back(slot, lives=lives)
        self._lateness.recount(self.holders.leased)
        return back

    def resume(self, next_: Key, standing: dict[Key, Any]) -> None:
        super().resume(next_, standing)
        self._lateness.found(self.holders.leased)

    def _is_alone(self, key: Key) -> bool:
        """Whether one slot has it, and no other a copy."""
        return key in self.holders.leased and not self.holders.is_copied(key)

    def _has_portion(self) -> bool:
        """Whether there may be a portion that nobody has."""
        epoch, portion = self.next
        return bool(self.holders.returned) or epoch * self.per_epoch + portion < self.limit


class Lateness:
    """Finds the straggling portions of a batch."""

    def __init__(self) -> None:
        self._since: dict[Key, float] = {}
        """Leased portion -> when it was leased, or first checked."""
        self._unseen: list[Key] = []
        """Portions leased by a previous coordinator, not checked yet."""
        self._oldest: list[tuple[float, int, Key]] = []
        """A heap of `_since`, with entries that are valid no more."""
        self._pushed = 0
        self._usual_s: float | None = None
        """Mean time from a portion's lease to its completion; None: none is complete."""

    def leased(self, key: Key, now: float) -> None:
        self._since[key] = now
        self._push(key)

    def found(self, keys: Iterable[Key]) -> None:
        """Leased according to a predecessor's records: their time begins when they are checked."""
        self._unseen = list(keys)

    def done(self, key: Key, now: float, *, copied: bool) -> None:
        """Count a portion as done. copied: leave its time out of the mean."""
        since = self._since.pop(key, None)
        if since is None or copied:
            return
        before = now - since if self._usual_s is None else self._usual_s
        self._usual_s = before + WEIGHT * (now - since - before)

    def recount(self, leased: Iterable[Key]) -> None:
        """A slot is gone: what it had copies of may be copied again."""
        self._oldest = []
        for key in leased:
            if key in self._since:
                self._push(key)

    def first(self, counts: Callable[[Key], bool], now: float) -> Key | None:
        """The oldest of the leased portions that count, if it is late; None: none is."""
        unseen, self._unseen = self._unseen, []
        for key in unseen:
            if counts(key) and key not in self._since:
                self.leased(key, now)
        oldest = self._first(counts)
        return oldest if oldest is not None and now >= self._due(oldest) else None

    def may_have(self, counts: Callable[[Key], bool], now: float) -> bool:
        """Whether `first` may find one, or has to check what a predecessor has leased."""
        oldest = self._first(counts)
        return bool(self._unseen) or (oldest is not None and now >= self._due(oldest))

    def deadline(self, counts: Callable[[Key], bool]) -> float | None:
        """When the next leased portion becomes late."""
        oldest = self._first(counts)
        return None if oldest is None or self._usual_s is None else self._due(oldest)

    def _first(self, counts: Callable[[Key], bool]) -> Key | None:
        while self._oldest:
            since, _, key = self._oldest[0]
            if self._since.get(key) == since and counts(key):
                return key
            heapq.heappop(self._oldest)
        return None

    def _push(self, key: Key) -> None:
        heapq.heappush(self._oldest, (self._since[key], self._pushed, key))
        self._pushed += 1

    def _due(self, key: Key) -> float:
        return math.inf if self._usual_s is None else self._since[key] + self._usual_s
