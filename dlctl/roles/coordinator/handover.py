"""How a coordinator that is to be restarted leaves: when those are there whom the next one needs.

The agent beside it starts the next coordinator, and only a coordinator starts the next agent: if
both were away at once, nobody would be left who brings the run back. So it stays until that agent
is there, however long that takes. For the others that were to be restarted with it, it stays for a
while, so that whoever has asked sees them come back one after the other; if it leaves before, the
next coordinator goes on with them (`Scaling.go_on`).

If this coordinator dies meanwhile, the one after it is new, which is all that was asked for.
"""

from __future__ import annotations

from dlctl.roles.coordinator.run_state import RunState
from dlctl.util.names import HOME_AGENT

OTHERS_S = 30.0
"""For the start of those that are restarted, on top of the grace that the old ones have."""


class Handover:
    def __init__(self, run: RunState) -> None:
        self.run = run
        self._why = ""
        """What this coordinator leaves for; "" while it is to stay."""
        self._others: dict[str, int] = {}
        """Name -> incarnation of those whose next process is waited for."""
        self._until = 0.0

    def begin(self, why: str, others: dict[str, int], now: float) -> None:
        """Leave, for this reason, when `others` (name -> incarnation now) have been replaced."""
        self._why = why
        self._others |= others
        self._until = now + self.run.job.timeouts.grace_s + OTHERS_S

    def deadline(self) -> float | None:
        is_waiting = self._why and self.is_agent_there() and self._late()
        return self._until if is_waiting else None

    def advance(self, now: float) -> None:
        if not self._why:
            return
        if self.run.shutdown is not None:
            self._why, self._others = "", {}  # The run's end is this coordinator's, too.
        elif self.is_agent_there() and (now >= self._until or not self._late()):
            self.run.context.leave(self._why)
            self._why, self._others = "", {}

    def is_agent_there(self) -> bool:
        """Whether somebody will see that this coordinator has left."""
        agent = self.run.members.daemons[HOME_AGENT]
        is_going = agent.leaving or agent.killed_for
        return agent.state == "running" and agent.registered and not is_going

    def _late(self) -> list[str]:
        return [name for name, old in self._others.items() if self._is_late(name, old)]

    def _is_late(self, name: str, old: int) -> bool:
        """Whether a daemon's next process is still to come, and will."""
        daemon = self.run.members.get(name)
        if daemon is None or not (daemon.alive or daemon.state == "backoff"):
            return False
        return daemon.incarnation <= old or not (daemon.alive and daemon.registered)
