"""How long a daemon continues without its coordinator.

A dead coordinator is restarted, and a broken link may recover: meanwhile workers and servers
continue. But no process is left running for ever.
"""

from __future__ import annotations

SILENT_S_MAX = 600.0
"""Without a heartbeat from a coordinator that may be alive behind a broken link."""
GONE_S_MAX = 60.0
"""After the exit of the coordinator and the agent was observed: time for a restart."""
LAST_CHANCE_S = 5.0
"""Time to read messages that arrived meanwhile: this process may have been paused (SIGSTOP)."""


class Watchdog:
    def __init__(self) -> None:
        self._until: float | None = None
        self._is_last_chance = False

    def heard(self, now: float) -> None:
        """The coordinator has sent a message (or this process has started)."""
        self._until, self._is_last_chance = now + SILENT_S_MAX, False

    def lost(self, now: float) -> None:
        """Start the countdown: both coordinator and agent have exited."""
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
