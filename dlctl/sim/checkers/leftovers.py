"""When a run has ended, none of its processes is still alive."""

from __future__ import annotations

from dlctl.sim.checkers.base import Checker
from dlctl.sim.world import World


class NothingLeft(Checker):
    def at_end(self, world: World) -> None:
        if living := world.living():
            raise self.broken(f"left behind: {', '.join(living)}")
