"""When a run has ended, none of its processes is still alive."""

from __future__ import annotations

from dlctl.sim.checkers.base import Checker
from dlctl.sim.process import Process
from dlctl.sim.world import World


def _is_guests(process: Process) -> bool:
    """Whether it is on a machine of somebody else, who may be cut off when the run ends."""
    return process.agent.startswith("guest")


class NothingLeft(Checker):
    def at_end(self, world: World) -> None:
        if living := [p.name for p in world.processes if p.alive and not _is_guests(p)]:
            raise self.broken(f"left behind: {', '.join(living)}")
