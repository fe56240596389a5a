"""The agent beside a coordinator terminates it if it hangs, as `daemons/agent/supervision.py`.

Its progress is detected by a file that it touches, not by messages: a failed link is no reason to
kill it.
"""

from __future__ import annotations

from collections.abc import Callable

from dlctl.runs.paths import STILL_LIMITS
from dlctl.sim.process import Process

LOOK_S = 1.0


def still_s(silent_s: float) -> float:
    """How long a coordinator may hang."""
    return STILL_LIMITS * silent_s


class SimSupervision:
    def __init__(self, agent: Process, coordinator: Callable[[], Process], silent_s: float) -> None:
        self.agent = agent
        self.coordinator = coordinator
        self.still_s = still_s(silent_s)
        self._worked_at = agent.timeline.now
        """When the coordinator last made progress, or when this agent itself was last stopped."""
        agent.timeline.after(LOOK_S, self._look)

    def _look(self) -> None:
        if not self.agent.alive:
            return
        coordinator, timeline = self.coordinator(), self.agent.timeline
        if self.agent.frozen or not coordinator.frozen:
            self._worked_at = timeline.now
        elif coordinator.alive and timeline.now - self._worked_at > self.still_s:
            coordinator.end(-9)
        timeline.after(LOOK_S, self._look)
