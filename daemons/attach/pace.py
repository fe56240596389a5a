"""When a loop looks up from its steps, at what the run wants of it meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from daemons.attach.ranks import ReplicaRanks

LOOK_S = 0.5
"""Interval at which the ranks of a replica look up."""


class Wish(NamedTuple):
    returns: bool
    """The run wants the model back."""
    reports: bool
    """It is time to report steps."""


NONE = Wish(returns=False, reports=False)


class StepPace(Protocol):
    def after_step(self, look: Callable[[], Wish]) -> Wish: ...


class EachStep:
    """Of a replica that is one process."""

    def after_step(self, look: Callable[[], Wish]) -> Wish:
        return look()


class Together:
    """Rank 0 looks, and says at which step all ranks meet for the next look. So they exchange
    something every `LOOK_S`, whatever a step takes, and nothing in the steps between.
    """

    def __init__(self, ranks: ReplicaRanks) -> None:
        self._ranks = ranks
        self._steps = self._left = 1
        """Between the last look and the next one, and those of them that are left."""
        self._looked_s = time.monotonic()

    def after_step(self, look: Callable[[], Wish]) -> Wish:
        self._left -= 1
        if self._left:
            return NONE
        wish, self._left = self._ranks.of_rank_0(lambda: (look(), self._until_next()))
        self._steps = self._left
        return wish

    def _until_next(self) -> int:
        now = time.monotonic()
        step_s, self._looked_s = (now - self._looked_s) / self._steps, now
        return max(1, min(2 * self._steps, int(LOOK_S / max(step_s, 1e-6))))
