"""The ranks of a replica as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
DEADLINE_S = 30.0


class _Meeting:
    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=DEADLINE_S)
        self.slots: list[Any] = [None] * count


class ThreadRanks:
    """tells: how often rank 0 has told something."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.count = rank, len(meeting.slots)
        self.tells = 0
        self._meeting = meeting

    def of_rank_0(self, make: Callable[[], T]) -> T:
        self.tells += 1
        told: T = self._exchanged(make() if self.rank == 0 else None)[0]
        return told

    def gathered(self, value: T) -> list[T]:
        every = self._exchanged(value)
        return every if self.rank == 0 else []

    def _exchanged(self, mine: Any) -> list[Any]:
        self._meeting.slots[self.rank] = mine
        self._meeting.barrier.wait()
        every = [*self._meeting.slots]
        self._meeting.barrier.wait()
        return every


def in_ranks(count: int, do: Callable[[ThreadRanks], T]) -> list[T]:
    """What it returns in each of so many ranks, which run at the same time."""
    meeting = _Meeting(count)
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(do, ThreadRanks(rank, meeting)) for rank in range(count)]
        return [each.result(DEADLINE_S) for each in running]
