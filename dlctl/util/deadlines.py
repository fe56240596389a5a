"""When each of many things is due. The earliest time is known without looking at all of them."""

from __future__ import annotations

import heapq
from collections.abc import Hashable


class Deadlines:
    """A heap with entries that are out of date: they are dropped when they come up."""

    def __init__(self) -> None:
        self._due: dict[Hashable, float] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._count = 0

    def set(self, key: Hashable, due: float | None) -> None:
        """Set when a key is due; None: it is not due any more."""
        if due is None:
            self._due.pop(key, None)
        elif self._due.get(key) != due:
            self._due[key] = due
            self._count += 1  # Keys cannot be compared.
            heapq.heappush(self._heap, (due, self._count, key))

    def first(self) -> float | None:
        """The earliest time; None if there is none."""
        heap = self._heap
        while heap and self._due.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def by(self, now: float) -> list[Hashable]:
        """The keys that are due by now; they stay until their times are set again."""
        found, heap = dict[Hashable, float](), self._heap
        while heap and heap[0][0] <= now:
            due, _, key = heapq.heappop(heap)
            if self._due.get(key) == due:
                found[key] = due
        for key, due in found.items():
            self._count += 1
            heapq.heappush(heap, (due, self._count, key))
        return list(found)
