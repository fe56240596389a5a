"""The guest role: one worker on a machine that nobody but its user can reach (`dlctl join`).

A guest is an agent of one worker, and dials in: it registers with the key of its invitation, waits
in line for a slot, and starts the worker with the term and key that it is sent. It serves the
worker's log like an agent, and reports its exit. The coordinator restarts nothing here: after a
crash the guest waits, with backoff, and asks for a slot again; so it does when the run has missed
it for too long. It leaves when its script has ended, when its user says so, or with the run.

    connecting -> in line -> working -> (a crash: paused -> in line) -> leaving
"""

from __future__ import annotations

from dlctl.roles.agent.children import HostedProcesses, ProcessStarted
from dlctl.roles.protocol.context import COORDINATOR, EXIT_FENCED, EXIT_POISONED, REPORT_S, Context
from dlctl.roles.protocol.effects import ProcessEnded
from dlctl.roles.protocol.files import BytesRead, ReadBytes, RemoveCopy
from dlctl.util.text import ordinal, plural
from dlctl.wire import messages as m
from dlctl.wire.machine import (
    DeadlineReached,
    Effect,
    Event,
    Exit,
    Received,
    Reconnected,
    Started,
    StopRequested,
)

PAUSE_FIRST_S, PAUSE_MAX_S = 1.0, 60.0
"""After the first crash in a row, and the longest pause."""
CRASHES_MAX = 6
"""Crashes in a row, each within `LIFE_S`: another start would not help."""
LIFE_S = 60.0
GOODBYE_S = 10.0
"""How long a guest whose script has ended in order stays: the run may want to start it again."""
LEAVE_S = 30.0
"""Time for the worker to push what it has; it is terminated after that."""
TERMINATE_S = 5.0
"""How long a process has between SIGTERM and SIGKILL."""
MISSED_S_MAX = 1800.0
"""Without a word from the coordinator for longer than this the run is given up."""


class Guest:
    def __init__(self, registration: m.Register, resend_s: float) -> None:
        self.registration = registration
        self.context = Context(resend_s)
        self._children = HostedProcesses(self.context)
        self._welcomed = False
        self._wants = False
        """It waits for a slot."""
        self._place = ""
        """What was shown last about the line."""
        self._is_missed = False
        """The run has taken this guest for gone: the end of its worker is no crash."""
        self._crashes = 0
        self._started_at = 0.0
        self._heard_at = 0.0
        self._report_at = 0.0
        self._again_at: float | None = None
        """When it asks for a slot again."""
        self._exit: Exit | None = None
        """How this guest ends, once it leaves."""
        self._leave_at: float | None = None
        """When it goes on with leaving: ends what is left, with the next signal."""
        self._signals = [15, 9]

    # ------------------------------------------------------------ the machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(_, message):
                self._heard_at = now
                self._on_message(message, now)
            case ProcessStarted(spawned):
                self._started_at = now
                self._children.on_started(spawned)
            case ProcessEnded(exited):
                self._on_ended(exited, now)
            case BytesRead(peer, answer):
                self.context.send(peer, answer)
            case Reconnected(peer, lost_at):
                self._report_at = now  # A report identifies the new connection.
                self.context.retries.again(peer, lost_at, now)
            case Started():
                self._heard_at = now
                self._register(now)
            case StopRequested(reason):
                self._stop(reason, now)
            case DeadlineReached():
                self._on_deadline(now)
        self._report_if_due(now)
        self._go_if_done()
        return self.context.clear()

    def deadline(self) -> float | None:
        times = [self.context.retries.deadline(), self._again_at, self._leave_at]
        times += [self._report_at] if self._welcomed else []
        times += [self._heard_at + MISSED_S_MAX] if self._exit is None else []
        return min((t for t in times if t is not None), default=None)

    def _on_message(self, message: m.Message, now: float) -> None:
        match message:
            case m.Welcome():
                self._on_welcome(now)
            case m.RegisterAgain() if self._exit is None:
                self._is_missed = bool(self._children.living())
                self._children.signal_all(9)  # The run has taken its worker for gone, too.
                self._register(now)
            case m.InLine():
                self._on_line(message)
            case m.Spawn() if self._exit is None:
                self._on_spawn(message, now)
            case m.Kill():
                self._children.on_kill(message, now)
            case m.ExitNoted():
                self._children.on_noted(message, now)
            case m.ReadFile():
                self.context.do(ReadBytes(COORDINATOR, message))
            case m.FileTaken(file):
                self.context.do(RemoveCopy(file))
            case m.Shutdown(reason, keep_state):
                self._leave(Exit(1 if keep_state else 0, reason), now)
            case m.Dismiss(reason):
                self._leave(Exit(EXIT_FENCED, reason), now)

    def _on_deadline(self, now: float) -> None:
        self.context.do(*self.context.retries.due(now))
        if self._again_at is not None and self._again_at <= now:
            self._again_at = None
            self._wants = True
        if self._leave_at is not None and self._leave_at <= now:
            self._end_children(now)
        if self._exit is None and now - self._heard_at >= MISSED_S_MAX:
            text = f"the run has not answered for {MISSED_S_MAX / 60:.0f} minutes"
            self._leave(Exit(1, text), now)

    # ------------------------------------------------------------ joining

    def _register(self, now: float) -> None:
        self.context.ask("register", COORDINATOR, self.registration, now)

    def _on_welcome(self, now: float) -> None:
        if self.context.retries.done("register", now) is None:
            return
        self._welcomed, self._report_at = True, now
        is_idle = not self._children.living() and self._again_at is None
        self._wants = is_idle and self._exit is None

    def _on_line(self, message: m.InLine) -> None:
        if not self._wants:
            return
        text = f"waiting: {message.reason}"
        if message.place:
            text = f"waiting for a free slot, {ordinal(message.place)} in line: {message.reason}"
        if text != self._place:
            self._place = text
            self.context.note("info", text)

    def _on_spawn(self, message: m.Spawn, now: float) -> None:
        if self._children.on_spawn(message, now):
            self._wants, self._place, self._again_at, self._leave_at = False, "", None, None
            self.context.note("info", f"joined as {message.name}")

    # ------------------------------------------------------------ the end of a process

    def _on_ended(self, exited: m.ProcessExited, now: float) -> None:
        self._children.on_ended(exited, now)
        if self._exit is not None or self._children.living():
            return
        status = exited.status
        if status == EXIT_FENCED or self._is_missed:  # It returns, with a new term.
            self._is_missed = False
            self._pause(PAUSE_FIRST_S, "the run has missed this worker", now)
        elif status == EXIT_POISONED:
            self._leave(Exit(EXIT_POISONED, "the run refuses what this worker computes"), now)
        elif status == 0:
            self._again_at, self._leave_at = None, now + GOODBYE_S
        else:
            self._on_crash(status, now)

    def _on_crash(self, status: int, now: float) -> None:
        self._crashes = 1 if now - self._started_at > LIFE_S else self._crashes + 1
        what = f"signal {-status}" if status < 0 else f"exit code {status}"
        if self._crashes > CRASHES_MAX:
            text = f"the script has failed {plural(self._crashes, 'time')} in a row ({what})"
            self._leave(Exit(status if status > 0 else 1, text), now)
            return
        pause_s = min(PAUSE_FIRST_S * 2 ** (self._crashes - 1), PAUSE_MAX_S)
        self._pause(pause_s, f"the script has ended with {what}", now)

    def _pause(self, pause_s: float, why: str, now: float) -> None:
        self._again_at = now + pause_s
        self.context.note("warning", f"{why}: it starts again in {pause_s:.0f} s")

    # ------------------------------------------------------------ leaving

    def _stop(self, reason: str, now: float) -> None:
        """The user wants to leave: the worker pushes what it has first, unless asked twice."""
        if self._exit is None:
            self._exit = Exit(0, reason)
            self._wants, self._again_at, self._report_at = False, None, now
            self._leave_at = now + LEAVE_S
        else:
            self._end_children(now)

    def _leave(self, how: Exit, now: float) -> None:
        """Nothing that the worker could still do would count."""
        if self._exit is None:
            self._exit = how
            self._wants, self._again_at = False, None
        self._leave_at = (
            now + TERMINATE_S
        )  # It exits on its own: the run has ended, or has said so.

    def _end_children(self, now: float) -> None:
        if self._exit is None:
            self._exit = Exit(0, "the script has ended")
        number = self._signals.pop(0) if len(self._signals) > 1 else self._signals[0]
        self._children.signal_all(number)
        self._leave_at = now + TERMINATE_S

    def _go_if_done(self) -> None:
        """Say goodbye; if that is lost, the silence says it."""
        if self._exit is not None and not self._children.living():
            me = self.registration
            self.context.send(COORDINATOR, m.ProcessExited(me.name, me.incarnation, 0, ()))
            self.context.do(self._exit)

    # ------------------------------------------------------------ reports

    def _report_if_due(self, now: float) -> None:
        if not self._welcomed or now < self._report_at:
            return
        self._report_at = now + REPORT_S
        me = self.registration
        phase = "leaving" if self._exit else "in line" if self._wants else "working"
        children = self._children.unreported()
        report = m.Report(me.name, me.incarnation, phase, "", {"children": children})
        self.context.send(COORDINATOR, report)
        if self._exit is not None and self._children.living():
            self.context.send(COORDINATOR, m.Leaving(me.name))
        elif self._wants:
            self.context.send(COORDINATOR, m.WantSlot(me.name))
