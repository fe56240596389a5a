"""Shards that clip an update together do so by one norm."""

from __future__ import annotations

from dlctl.sim.checkers.base import Checker
from dlctl.sim.process import Process
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send


class NormChecker(Checker):
    """The norm of a clock never changes, whichever coordinator answers which server."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}

    def on_effect(self, process: Process, effect: Effect) -> None:
        match effect:
            case Send(_, m.NormTotal(clock, squared)):
                before = self._first.setdefault(clock, squared)
                if squared != before:
                    raise self.broken(f"for clock {clock} first {before:g}, then {squared:g}")
