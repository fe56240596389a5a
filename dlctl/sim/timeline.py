"""Virtual time: scheduled functions, in order. Nothing waits; the clock jumps."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Timeline:
    """Runs functions in virtual time. At the same instant the one scheduled first runs first."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the simulation began."""
        self._plans: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        """Schedule a function at a time; as soon as possible if that time has passed."""
        self._planned += 1
        heapq.heappush(self._plans, (max(when_s, self.now), self._planned, do))

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        self.at(self.now + delay_s, do)

    def step(self, until_s: float) -> bool:
        """Run the next function, if there is one by `until_s`; False if there is none."""
        if not self._plans or self._plans[0][0] > until_s:
            return False
        self.now, _, do = heapq.heappop(self._plans)
        do()
        return True
