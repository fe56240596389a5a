"""How long a daemon goes on without its coordinator.

A coordinator that dies is started again, and a link that fails may heal: meanwhile workers and
servers go on with what they have. But nothing is left running for ever.
"""

from __future__ import annotations

SILENT_S_MAX = 600.0
"""Without a heartbeat from a coordinator that may live behind a broken link."""
GONE_S_MAX = 60.0
"""After its end, and the agent's, has been seen: for somebody to start it again."""
LAST_CHANCE_S = 5.0
"""To read what has come meanwhile: we may have been frozen ourselves."""


class Watchdog:
    def __init__(self) -> None:
        self._until: float | None = None
        self._is_last_chance = False

    def heard(self, now: float) -> None:
        """A message of the coordinator (or our own start)."""
        self._until, self._is_last_chance = now + SILENT_S_MAX, False

    def lost(self, now: float) -> None:
        """Nobody is left who could speak to us."""
        self._until = min(self._until or now + GONE_S_MAX, now + GONE_S_MAX)

    def deadline(self) -> float | None:
        return self._until

    def is_over(self, now: float) -> bool:
        if self._until is None or now < self._until:
            return False
        if not self._is_last_chance:
            self._until, self._is_last_chance = now + LAST_CHANCE_S, True
            return False
        return True
