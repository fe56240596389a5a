"""A server that has no room for its shard, as it was kept: it tries again until there is some."""

from __future__ import annotations

from dlctl import messages as m

RETRY_S, RETRY_S_MAX = 1.0, 4.0
"""Between two attempts; each pause is longer, because an attempt may read all that was kept."""


class Space:
    def __init__(self) -> None:
        self.wanted_for: m.Assign | None = None
        """What the server is to take charge of; None: it does not wait."""
        self._try_at = 0.0
        self._has_failed = False
        """An attempt, just now: what it took is no part of the pause behind it."""
        self._pause_s = RETRY_S

    def wait(self, message: m.Assign, now: float) -> bool:
        """There is none. Returns whether that is news."""
        is_news = self.wanted_for is None
        self.wanted_for, self._try_at, self._has_failed = message, now, True
        return is_news

    def found(self) -> None:
        self.wanted_for, self._pause_s = None, RETRY_S

    def deadline(self) -> float | None:
        return None if self.wanted_for is None else self._try_at

    def due(self, now: float) -> m.Assign | None:
        """What is to be tried again now."""
        if self._has_failed:
            self._try_at, self._has_failed = now + self._pause_s, False
            self._pause_s = min(2 * self._pause_s, RETRY_S_MAX)
        return self.wanted_for if now >= self._try_at else None
