"""What a simulation sees of the whole run, and no daemon does."""

from __future__ import annotations

from dlctl.algorithms.roster import IDLE
from dlctl.roles.protocol.effects import Reduce
from dlctl.sim.checkers.base import Checker
from dlctl.sim.process import Process
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send


class RunWatcher(Checker):
    """Sees all effects."""

    def __init__(self) -> None:
        self.clock_gap = 0
        """The most clocks by which a worker that pushed was ahead of a worker that had not."""
        self.summed_values = 0
        """Of all vectors that replicas have given to sums of their group."""
        self._clocks: dict[str, int] = {}
        """Worker -> the clock that it is at: its newest push was of the one before."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        match effect:
            case Reduce(vector=vector):
                self.summed_values += len(vector)
            case Send(message=m.Push(clock=clock)) if clock >= IDLE:
                self._clocks.pop(process.name, None)  # It has no data: nobody waits for it.
            case Send(message=m.Push(clock=clock)) if clock >= 0:
                self._clocks.setdefault(process.name, clock)
                ahead = clock - min(self._clocks.values())
                self.clock_gap = max(self.clock_gap, ahead)
                self._clocks[process.name] = max(clock + 1, self._clocks[process.name])

    def to_json(self) -> m.Json:
        return {"clock_gap": self.clock_gap, "summed_values": self.summed_values}
