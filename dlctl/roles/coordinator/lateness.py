"""Which portions of a batch are late: whoever has nothing to do gets a backup copy of them (Dean et
al. 2012, section 4.2). The first to bring a portion wins, on every shard by itself.

Late is what has been under way for longer than portions usually are, from their lease to the word
that they are done. Before that a copy would come too late, and keep its worker from the next batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dlctl.roles.coordinator.portions import Key

WEIGHT = 0.1
"""Of the newest portion in the usual time."""


class Lateness:
    def __init__(self) -> None:
        self._since: dict[Key, float] = {}
        """Portion under way -> when it was leased, or first looked for."""
        self._usual_s: float | None = None
        """From the lease of a portion to its end; None: none has come to it."""

    def leased(self, key: Key, now: float) -> None:
        self._since[key] = now

    def done(self, key: Key, now: float, *, copied: bool) -> None:
        """copied: it says nothing of what is usual."""
        since = self._since.pop(key, None)
        if since is None or copied:
            return
        before = now - since if self._usual_s is None else self._usual_s
        self._usual_s = before + WEIGHT * (now - since - before)

    def first(self, keys: Iterable[Key], now: float) -> Key | None:
        """Of these, under way, the one that is late for longest; None: none is."""
        oldest = min(keys, key=lambda key: self._since.setdefault(key, now), default=None)
        return oldest if oldest is not None and now >= self._due(oldest) else None

    def deadline(self, keys: Iterable[Key]) -> float | None:
        """When the next of these is late."""
        return min((self._due(key) for key in keys if key in self._since), default=None)

    def _due(self, key: Key) -> float:
        return math.inf if self._usual_s is None else self._since[key] + self._usual_s
