"""After all faults, a run makes progress; if it does not, report which daemon waits for which."""

from __future__ import annotations

from dlctl.roles.coordinator.records import AddEvent
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers.base import Checker
from dlctl.sim.process import Process
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Exit, Send
from dlctl.wire.messages import APPLIED, LATE

MARKS = {"state", "checkpoint", "evaluation"}
"""Kinds of events in a run's history that are progress."""


class LivenessChecker(Checker):
    """After `heal_at_s` there is no pause of `within_s` (virtual seconds) without global progress:
    a push that is applied, a portion that is noted, a checkpoint, an evaluation, another state.
    """

    def __init__(self, heal_at_s: float, within_s: float = 20.0) -> None:
        self.within_s = within_s
        self._newest_s = heal_at_s
        """The last progress, or the end of all faults."""
        self._over = False
        self._reports: dict[str, tuple[float, m.Report]] = {}
        """Daemon -> (when, the last report that it has sent)."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        now = process.timeline.now
        if self._is_progress(effect):
            self._newest_s = max(self._newest_s, now)
        if isinstance(effect, Send) and isinstance(effect.message, m.Report):
            self._reports[process.name] = (now, effect.message)
        if isinstance(effect, Exit) and process.name == COORDINATOR:
            self._over = True  # Leftover processes are checked by another checker.
        if not process.name.startswith("client"):  # It retries even if no daemon is left.
            self._check(now)

    def _is_progress(self, effect: Effect) -> bool:
        match effect:
            case Send(_, m.Ack(outcome=outcome)):
                return outcome in (APPLIED, LATE)
            case Send(_, m.PortionNoted() | m.VectorResult()):
                return True
            case AddEvent(kind):
                return kind in MARKS
        return False

    def _check(self, now: float) -> None:
        if not self._over and now > self._newest_s + self.within_s:
            raise self.broken(
                f"no progress since {self._newest_s:.1f} s: {self.waiting_daemons(now)}"
            )

    def waiting_daemons(self, now: float) -> str:
        """One part per daemon, as it has last reported."""
        parts = []
        for name, (at, report) in sorted(self._reports.items()):
            waits = f", waits for {report.waiting_for}" if report.waiting_for else ""
            ago = f" ({now - at:.0f} s ago)" if now - at > 2 else ""
            parts.append(f"{name}: {report.phase}{waits}{ago}")
        return "; ".join(parts) or "no daemon has reported"
