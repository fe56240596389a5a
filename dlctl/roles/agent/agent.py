"""The agent role: starts and terminates the daemons of one host, and reports their exits.

It decides nothing: the coordinator decides which incarnation runs, and when a dead one is replaced.
The agent's reports list the daemons on its host, so that a coordinator that was down catches up. An
agent that replaces a dead one adopts its daemons. The agent beside the coordinator restarts it when
it dies. If there is no heartbeat from the coordinator for long, the agent terminates all daemons
here, so that no process outlives its run.
"""

from __future__ import annotations

from dlctl.roles.agent.children import HostedProcesses, ProcessStarted
from dlctl.roles.protocol.context import COORDINATOR, EXIT_FENCED, REPORT_S, Context
from dlctl.roles.protocol.effects import (
    CoordinatorGone,
    ProcessEnded,
    RestartCoordinator,
)
from dlctl.roles.protocol.files import BytesRead, ReadBytes, RemoveCopy
from dlctl.roles.protocol.live_values import LiveValues
from dlctl.roles.protocol.watchdog import Watchdog
from dlctl.util.names import HOME_AGENT
from dlctl.util.text import COORDINATOR_GONE
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
from dlctl.wire.messages import Register

RESTART_FIRST_S, RESTART_MAX_S = 0.5, 5.0
"""The coordinator is restarted at once; with backoff while each one dies before it works, until the
`Watchdog` expires."""
WORKS_S = 2.0
"""A coordinator that sends a message so long after its restart works."""
TERMINATE_S = 5.0
"""How long a process has between SIGTERM and SIGKILL."""


class Agent:
    def __init__(
        self, registration: Register, resend_s: float, adopted: tuple[m.Spawned, ...] = ()
    ) -> None:
        """`adopted`: live daemons that an earlier agent has started."""
        self.registration = registration
        self.context = Context(resend_s)
        self.live = LiveValues(self.context, registration.name, {})
        self._children = HostedProcesses(self.context, adopted)
        self._lifeline = Watchdog()
        self._restarts = 0
        """Restarts of the coordinator since one has worked."""
        self._restarted_at = -WORKS_S
        self._restart_at: float | None = None
        self._report_at = 0.0
        self._welcomed = False
        self._leaving = ""
        """Why this agent is about to exit; "" while it is not."""
        self._kill_at: float | None = None
        self.is_over = False
        """The run needs nothing on this host any more."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(_, message):
                self._lifeline.heard(now)
                if now - self._restarted_at >= WORKS_S:
                    self._restarts = 0
                self._on_message(message, now)
            case ProcessStarted(spawned):
                self._children.on_started(spawned)
            case ProcessEnded(exited):
                self._children.on_ended(exited, now)
            case BytesRead(peer, answer):
                self.context.send(peer, answer)
            case Reconnected(peer, lost_at):
                self._report_at = now  # A report identifies the new connection.
                self.context.retries.again(peer, lost_at, now)
            case CoordinatorGone():
                self._plan_restart(now)
            case Started():
                self._lifeline.heard(now)
                if adopted := self._children.names():
                    self.context.note("info", f"adopts {', '.join(adopted)}")
                self._register(now)
            case StopRequested(reason):
                self._leave(reason, now)
            case DeadlineReached():
                self._on_deadline(now)
        self._report_if_due(now)
        if self._leaving and not self._children.living():
            registration = self.registration
            if registration.name != HOME_AGENT:  # The coordinator detects the exit of that agent.
                gone = m.ProcessExited(registration.name, registration.incarnation, 0, ())
                self.context.send(COORDINATOR, gone)
            self.context.do(Exit(0, self._leaving))
        return self.context.clear()

    def deadline(self) -> float | None:
        times = [self.context.retries.deadline(), self._kill_at, self._restart_at]
        times += [self._lifeline.deadline()] if not self._leaving else []
        times += [self._report_at] if self._welcomed else []
        return min((t for t in times if t is not None), default=None)

    def _register(self, now: float) -> None:
        self.context.ask("register", COORDINATOR, self.registration, now)

    def _on_message(self, message: m.Message, now: float) -> None:
        match message:
            case m.Welcome(settings=settings):
                self._welcomed = True
                self.context.retries.done("register", now)
                self.live.begin(settings)
            case m.RegisterAgain() if not self._leaving:
                self._register(now)
            case m.Spawn() if not self._leaving:  # It would have to be terminated at once.
                self._children.on_spawn(message, now)
            case m.Kill():
                self._children.on_kill(message, now)
            case m.ExitNoted():
                self._children.on_noted(message, now)
            case m.ReadFile():
                self.context.do(ReadBytes(COORDINATOR, message))
            case m.FileTaken(file):
                self.context.do(RemoveCopy(file))
            case m.ChangeSettings():
                self.live.on_change(message)
            case m.Shutdown(reason, keep_state):
                self.is_over = not keep_state
                self._leave(reason, now)
            case m.Dismiss(reason):
                # Another agent has replaced this one, and adopted its daemons.
                self.context.do(Exit(EXIT_FENCED, reason))

    def _leave(self, reason: str, now: float) -> None:
        if not self._leaving:
            self._leaving = reason
            self._kill_at = now + TERMINATE_S
            self._children.signal_all(15)

    def _on_deadline(self, now: float) -> None:
        self.context.do(*self.context.retries.due(now))
        if self._kill_at is not None and self._kill_at <= now:
            self._kill_at = None
            self._children.signal_all(9)
        if self._restart_at is not None and self._restart_at <= now:
            self._restart_at = None
            self._restarts, self._restarted_at = self._restarts + 1, now
            self.context.note("warning", COORDINATOR_GONE)
            self.context.do(RestartCoordinator())
            # We may not be on record: the disk may have been full when we registered.
            self._register(now)
        if not self._leaving and self._lifeline.is_over(now):
            self.context.note("error", "no heartbeat from the coordinator for too long: ending")
            self._leave("the coordinator is gone", now)

    def _plan_restart(self, now: float) -> None:
        if self._leaving or self._restart_at is not None:
            return
        again = self._restarts
        pause_s = min(RESTART_FIRST_S * 2**again, RESTART_MAX_S) if again else 0.0
        self._restart_at = now + pause_s
        if again:
            text = f"the coordinator died {again + 1} times in a row: again in {pause_s:.1f} s"
            self.context.note("error", f"{text}; see dlctl logs coordinator")

    def _report_if_due(self, now: float) -> None:
        if self._welcomed and now >= self._report_at:
            self._report_at = now + REPORT_S
            registration = self.registration
            children = self._children.unreported()
            metrics = {"children": children, "settings": self.live.values()}
            report = m.Report(registration.name, registration.incarnation, "watching", "", metrics)
            self.context.send(COORDINATOR, report)
