"""The agent role: starts and ends the daemons of one host, and says when one has ended.

It decides nothing: which incarnation runs, and when a dead one is replaced, is the coordinator's
business. An agent that has not heard from its coordinator for long ends what it has started, so
that nothing is left running on a host whose run is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlctl import messages as m
from dlctl.machine import (
    Configure,
    DeadlineReached,
    Effect,
    Event,
    Exit,
    Received,
    Started,
    StopRequested,
)
from dlctl.roles.desk import COORDINATOR, REPORT_S, Birth, Desk
from dlctl.roles.effects import ProcessEnded, SignalProcess, StartProcess

ORPHAN_S = 60.0
"""Without a word from the coordinator after which an agent ends its daemons and itself."""
TERMINATE_S = 5.0
"""Between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class ProcessStarted(Event):
    name: str
    incarnation: int
    pid: int


@dataclass(slots=True)
class _Child:
    incarnation: int
    pid: int = 0
    alive: bool = True


class Agent:
    def __init__(self, birth: Birth, resend_s: float) -> None:
        self.birth = birth
        self.desk = Desk(resend_s)
        self.log_level = "info"
        self._children: dict[str, _Child] = {}
        self._heard_at = self._looked_at = 0.0
        self._report_at = 0.0
        self._welcomed = False
        self._leaving = ""
        """Why this agent is about to exit; "" while it is not."""
        self._kill_at: float | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(_, message):
                self._heard_at = now
                self._on_message(message, now)
            case ProcessStarted(name, incarnation, pid):
                self._children[name].pid = pid
                self.desk.send(COORDINATOR, m.Spawned(name, incarnation, pid))
            case ProcessEnded():
                self._on_ended(event, now)
            case Started():
                self._heard_at = self._looked_at = now
                self.desk.ask("register", COORDINATOR, self.birth.register(), now)
            case StopRequested(reason):
                self._leave(reason, now)
            case DeadlineReached():
                self._on_deadline(now)
        self._report_if_due(now)
        if self._leaving and not self._living():
            self.desk.do(Exit(0, self._leaving))
        return self.desk.clear()

    def deadline(self) -> float | None:
        times = [self.desk.outstanding.deadline(), self._kill_at, self._heard_at + ORPHAN_S]
        times += [self._report_at] if self._welcomed else []
        return min(t for t in times if t is not None)

    def _living(self) -> list[tuple[str, _Child]]:
        return [(name, child) for name, child in self._children.items() if child.alive]

    def _on_message(self, message: m.Message, now: float) -> None:
        match message:
            case m.Welcome():
                self._welcomed = True
                self.desk.outstanding.done("register", now)
            case m.Spawn():
                self._on_spawn(message)
            case m.Kill(name, incarnation, signal):
                self.desk.do(SignalProcess(name, incarnation, signal))
            case m.ExitNoted(name, incarnation):
                self.desk.outstanding.done(("exit", name, incarnation), now)
            case m.Change():
                before = {"log_level": self.log_level}
                self.log_level = message.settings.get("log_level", self.log_level)
                self.desk.do(Configure("log_level", self.log_level))
                after = {"log_level": self.log_level}
                self.desk.answer_change(message, self.birth.name, before, after)
            case m.Shutdown(reason) | m.Dismiss(reason):
                self._leave(reason, now)

    def _on_spawn(self, message: m.Spawn) -> None:
        child = self._children.get(message.name)
        if child is not None and child.incarnation >= message.incarnation:
            if child.pid:
                self.desk.send(COORDINATOR, m.Spawned(message.name, child.incarnation, child.pid))
            return
        if child is not None and child.alive:
            self.desk.do(SignalProcess(message.name, child.incarnation, 9))
        self._children[message.name] = _Child(message.incarnation)
        self.desk.do(StartProcess(message.name, message.role, message.incarnation))

    def _on_ended(self, event: ProcessEnded, now: float) -> None:
        child = self._children.get(event.name)
        if child is not None and child.incarnation == event.incarnation:
            child.alive = False
        exited = m.ProcessExited(
            event.name, event.incarnation, event.status, event.last_lines, event.cause
        )
        self.desk.ask(("exit", event.name, event.incarnation), COORDINATOR, exited, now)

    def _leave(self, reason: str, now: float) -> None:
        if not self._leaving:
            self._leaving = reason
            self._kill_at = now + TERMINATE_S
            for name, child in self._living():
                self.desk.do(SignalProcess(name, child.incarnation, 15))

    def _on_deadline(self, now: float) -> None:
        self.desk.do(*self.desk.outstanding.due(now))
        if self._kill_at is not None and self._kill_at <= now:
            self._kill_at = None
            for name, child in self._living():
                self.desk.do(SignalProcess(name, child.incarnation, 9))
        if now - self._looked_at > ORPHAN_S / 2:
            self._heard_at = now  # We were stopped ourselves; what was said is still to be read.
        self._looked_at = now
        if now >= self._heard_at + ORPHAN_S:
            self._heard_at = now
            self.desk.note("error", f"no word from the coordinator for {ORPHAN_S:.0f} s: ending")
            self._leave("the coordinator is gone", now)

    def _report_if_due(self, now: float) -> None:
        if self._welcomed and now >= self._report_at:
            self._report_at = now + REPORT_S
            metrics = {"daemons": len(self._living()), "settings": {"log_level": self.log_level}}
            birth = self.birth
            report = m.Report(birth.name, birth.incarnation, "watching", "", metrics)
            self.desk.send(COORDINATOR, report)
