"""Operations of the method's engine, and the steps of the replica's own optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlctl.algorithms.needs import Engine, OwnState, OwnStep
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import EngineRan, ExchangeOwn, RunEngine, StepAlong
from dlctl.roles.worker.services.base import STUCK_S_MIN, Phase, Service
from dlctl.wire import messages as m

STUCK_OPERATIONS = 3.0
"""An operation hangs if it takes so many times longer than the longest one so far: their times
vary."""
RUNNING = "running its engine"
STEPPING = "making a step"


class Engines(Service[Engine | OwnStep | OwnState]):
    """Serves `Engine`, `OwnStep` and `OwnState`: one operation at a time."""

    def __init__(self, context: Context, is_held: Callable[[], bool]) -> None:
        """is_held: whether torch's state must not change, because it is being saved."""
        self.context = context
        self.is_held = is_held
        self.is_at_work = False
        self._result: tuple[m.Array, ...] | None = None
        self._began = self._longest_s = 0.0
        self._waits = True
        """The method is resumed only when the running operation has completed."""
        self._need: Engine | OwnStep | OwnState | None = None

    def begin(self, need: Engine | OwnStep | OwnState, now: float) -> None:
        self._need, self._result = need, None

    def _begin(self, need: Engine | OwnStep | OwnState, now: float) -> None:
        self.is_at_work, self._began = True, now
        self._waits = not isinstance(need, OwnStep) or need.wait
        self._result = None if self._waits else ()
        match need:
            case OwnStep():
                self.context.do(StepAlong(need.gradient, need.rate))
            case OwnState():
                self.context.do(ExchangeOwn(need.take))
            case Engine():
                self.context.do(RunEngine(need.op, need.arrays, need.shapes))

    def poll(self, now: float) -> tuple[bool, Any]:
        if self._result is None and not self.is_at_work:
            assert self._need is not None
            if isinstance(self._need, Engine) or not self.is_held():
                self._begin(self._need, now)
        if self._result is None:
            return False, None
        match self._need:
            case OwnStep():
                return True, None
            case OwnState():
                return True, self._result[0]
        return True, self._result

    def on_ran(self, event: EngineRan, now: float) -> None:
        self.is_at_work = False
        if self._waits:
            self._result = event.arrays
        self._longest_s = max(self._longest_s, now - self._began)

    def stuck_s(self, now: float) -> float:
        """How long the current operation has taken, if far longer than any before it, else 0."""
        took_s = now - self._began if self.is_at_work else 0.0
        return took_s if took_s > max(STUCK_S_MIN, STUCK_OPERATIONS * self._longest_s) else 0.0

    def phase(self) -> Phase:
        if not self.is_at_work:
            return Phase("saving")
        return Phase(RUNNING if isinstance(self._need, Engine) else STEPPING)
