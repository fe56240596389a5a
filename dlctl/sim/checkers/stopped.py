"""Which computations begin again because the one before them was stopped (`StopCompute`)."""

from __future__ import annotations

from dlctl.roles.protocol.effects import Compute, StopCompute
from dlctl.sim.process import Process
from dlctl.wire.machine import Effect


class StoppedBatches:
    """A batch that was stopped is the next one that its worker computes."""

    def __init__(self) -> None:
        self._last: dict[Process, Compute] = {}
        self._stopped: dict[Process, int] = {}
        """The ticket of the newest computation that was told to stop."""

    def is_again(self, process: Process, effect: Effect) -> bool:
        """Whether this computation is of the batch of the one before it. To be asked of every
        effect."""
        if isinstance(effect, StopCompute):
            self._stopped[process] = effect.ticket
        if not isinstance(effect, Compute):
            return False
        last, self._last[process] = self._last.get(process), effect
        if last is None or self._stopped.get(process) != last.ticket:
            return False
        return _batch(last) == _batch(effect)


def _batch(effect: Compute) -> tuple[int, ...]:
    return effect.data_epoch, effect.shard, effect.start, effect.stop, effect.number
