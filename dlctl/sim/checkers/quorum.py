"""One decider: every shard makes a step with the same pushes."""

from __future__ import annotations

from typing import Any

from dlctl.algorithms.base import Process as Worker
from dlctl.sim.checkers.base import Checker
from dlctl.sim.process import Process
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send

Used = frozenset[Worker]
ROUNDING_S = 1e-9


class QuorumChecker(Checker):
    """Checks that a decision never changes, and that all shards carry it out, except for lost
    pushes of dead workers. For methods whose shard sides record the pushes of `newest_step`.
    """

    def __init__(self, rest_s: float = 0.0) -> None:
        """rest_s: the wait of the lead at every clock."""
        self._rest_s = rest_s
        self._decided: dict[int, Used] = {}
        self._decided_at: dict[int, float] = {}
        self._gone: set[Worker] = set()

    def on_effect(self, process: Process, effect: Effect) -> None:
        match effect:
            case Send(_, m.Decided() as decided):
                self._on_decided(decided, process.timeline.now)
            case Send(_, m.Holding(shard)):
                step = process.machine.serving.side.newest_step  # type: ignore[attr-defined]
                if step is not None:
                    self._on_step(shard, *step)

    def _on_decided(self, decided: m.Decided, now: float) -> None:
        used, gone = _workers(decided.used), _workers(decided.gone)
        self._gone |= gone
        before = self._decided.setdefault(decided.clock, used)
        if used != before:
            text = f"for clock {decided.clock} first {sorted(before)} counted, then {sorted(used)}"
            raise self.broken(text)
        at = self._decided_at.setdefault(decided.clock, now)
        rested_s = at - self._decided_at.get(decided.clock - 1, -self._rest_s)
        if used and rested_s < self._rest_s - ROUNDING_S:
            raise self.broken(f"the lead has waited {rested_s:.3f} s at clock {decided.clock}")

    def _on_step(self, shard: int, clock: int, used: Used) -> None:
        decided = self._decided.get(clock, frozenset())
        if used - decided or decided - used - self._gone:
            raise self.broken(
                f"server-{shard} made step {clock} with {sorted(used)}, and not {sorted(decided)}"
            )


def _workers(numbers: Any) -> Used:
    return frozenset((slot, term) for slot, term in numbers.reshape(-1, 2).tolist())
