"""Named points within a daemon's code at which it may die: between two writes of its storage.

The code under test calls `point("after-the-weights")` at such places; in the real daemons that does
nothing. `faults.Moment` crashes processes at messages instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dlctl.sim.process import Crashed, Process


@dataclass(frozen=True, slots=True, kw_only=True)
class PointCrash:
    """Kill `name` when it passes `point` for the `count`-th time, over all its incarnations."""

    name: str
    point: str
    count: int = 1


class CrashPoints:
    def __init__(self) -> None:
        self.armed: list[PointCrash] = []
        self.passed: Counter[tuple[str, str]] = Counter()
        """(daemon, point) -> how often it was passed."""
        self.crashes = 0

    def hook(self, process: Process) -> Callable[[str], None]:
        """A function that `process` calls with the name of a point. It may raise `Crashed`."""

        def point(name: str) -> None:
            self.passed[process.name, name] += 1
            count = self.passed[process.name, name]
            if PointCrash(name=process.name, point=name, count=count) in self.armed:
                self.crashes += 1
                raise Crashed(name)

        return point
