"""Daemons that are killed now and then, for `dlctl simulate --faults`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.world import World


class Killer:
    """every_s: role -> mean seconds between two kills of one of its daemons, at random times."""

    def __init__(self, world: World, every_s: Mapping[str, float], seed: int) -> None:
        self.world = world
        self.killed = 0
        for number, (role, mean_s) in enumerate(sorted(every_s.items())):
            self._plan(role, mean_s, np.random.default_rng([seed, 31, number]))

    def _plan(self, role: str, mean_s: float, rng: np.random.Generator) -> None:
        def kill() -> None:
            living = self.world.living(role)
            if living:
                self.world.kill(living[int(rng.integers(len(living)))])
                self.killed += 1
            self._plan(role, mean_s, rng)

        self.world.timeline.after(float(rng.exponential(mean_s)), kill)


ROLES = ("worker", "server", COORDINATOR)
"""Who can be killed so."""
