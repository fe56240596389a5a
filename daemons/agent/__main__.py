"""An agent: starts the daemons of its host and sees them end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess

from daemons import process, signals
from daemons.agent.oom import OomWatch
from daemons.lastwords import last_lines
from daemons.loop import Loop
from dlctl import runs
from dlctl.launch import local
from dlctl.roles.agent import Agent, ProcessStarted
from dlctl.roles.desk import COORDINATOR
from dlctl.roles.effects import ProcessEnded, SignalProcess, StartProcess

log = logging.getLogger("dlctl")


class Children:
    """The processes that this agent has started; a pidfd each, so none is mistaken."""

    def __init__(self, context: process.Context, loop: Loop) -> None:
        self.context = context
        self.loop = loop
        self._running: dict[tuple[str, int], tuple[subprocess.Popen[bytes], int]] = {}
        self._killed: set[int] = set()
        """Pids that got SIGKILL from us: nobody needs to look for another reason."""
        self._oom = OomWatch()

    def start(self, effect: StartProcess) -> None:
        directory, control = self.context.directory, self.context.control
        name, incarnation = effect.name, effect.incarnation
        try:
            child = local.start(directory, effect.role, name, incarnation, control)
        except OSError as error:
            self.loop.post(ProcessEnded(name, incarnation, 1, (f"cannot start it: {error}",)))
            return
        pidfd = os.pidfd_open(child.pid)
        self._running[name, incarnation] = (child, pidfd)
        self._oom.begin(child.pid)
        self.loop.watch(pidfd, lambda: self._ended(name, incarnation))
        self.loop.post(ProcessStarted(name, incarnation, child.pid))

    def _ended(self, name: str, incarnation: int) -> None:
        child, pidfd = self._running.pop((name, incarnation))
        self.loop.unwatch(pidfd)
        os.close(pidfd)
        _end_group(child.pid)
        status = child.wait()
        words = last_lines(runs.log_path(self.context.directory, name, incarnation))
        by_another = status == -signal.SIGKILL and child.pid not in self._killed
        cause = self._oom.cause(child.pid) if by_another else ""
        self._oom.forget(child.pid)
        self._killed.discard(child.pid)
        self.loop.post(ProcessEnded(name, incarnation, status, words, cause))

    def look(self) -> None:
        """A chore: keep what is known of the memory of all children new."""
        self._oom.look()

    def signal(self, effect: SignalProcess) -> None:
        running = self._running.get((effect.name, effect.incarnation))
        if running is not None:
            if effect.signal == signal.SIGKILL:
                self._killed.add(running[0].pid)
            signal.pidfd_send_signal(running[1], effect.signal)


def _end_group(pid: int) -> None:
    """End what a daemon that has ended leaves behind, such as the processes that load its data.

    Every daemon leads a group of its own. While its end is not collected, nobody else's can have
    the number.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def serve(context: process.Context) -> int:
    def chores() -> None:
        context.log_handler.rotate_if_full()
        children.look()

    loop = Loop(chores)
    children = Children(context, loop)
    loop.perform(StartProcess, children.start)
    loop.perform(SignalProcess, children.signal)
    signals.stop_the_run(loop, context.directory)
    loop.transport.connect(COORDINATOR, context.control)
    return loop.run(Agent(context.birth, context.job.timeouts.resend_s))


process.main("agent", serve)
