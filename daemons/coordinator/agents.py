"""The agents of a coordinator: those that it has placed, and those that it finds when it comes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from dataclasses import dataclass

from daemons import process
from daemons.lastwords import exit_code, last_lines
from daemons.loop import Loop
from dlctl import processes, runs
from dlctl.launch import local
from dlctl.roles.effects import ProcessEnded
from dlctl.roles.journal import KillAgent, LaunchAgent
from dlctl.roles.membership import STATUS_UNKNOWN

log = logging.getLogger("dlctl")


@dataclass(slots=True)
class _Agent:
    incarnation: int
    pidfd: int
    popen: subprocess.Popen[bytes] | None
    """None: another coordinator has placed it."""


class Agents:
    def __init__(self, context: process.Context, loop: Loop, control: str) -> None:
        self.context = context
        self.loop = loop
        self.control = control
        self.launcher = local.Local()
        self._running: dict[str, _Agent] = {}
        loop.perform(LaunchAgent, self._launch)
        loop.perform(KillAgent, self._kill)

    def adopt(self) -> dict[str, int]:
        """Look after the agents of this run that are here already: name -> incarnation."""
        newest = {d.name: d for d in sorted(self._living(), key=lambda d: d.incarnation)}
        for name, daemon in newest.items():
            pidfd = processes.hold(daemon.pid, daemon.start)
            if pidfd is not None:
                self._hold(name, _Agent(daemon.incarnation, pidfd, None))
        return {name: agent.incarnation for name, agent in self._running.items()}

    def _living(self) -> list[local.Living]:
        return [d for d in local.living(self.context.directory) if d.role == "agent"]

    def _launch(self, effect: LaunchAgent) -> None:
        """Place an agent. One of the same name that is still there ends: it has nothing to say."""
        for daemon in self._living():
            if daemon.name == effect.name:
                log.warning("an older %s is still there: it is killed", effect.name)
                processes.send_signal(daemon.pid, daemon.start, signal.SIGKILL)
        directory, name, incarnation = self.context.directory, effect.name, effect.incarnation
        try:
            popen = self.launcher.start_agent(directory, name, incarnation, self.control)
        except OSError as error:
            # It may be possible again a little later: no memory, no process number, no room.
            words = (f"cannot start it: {error}",)
            self.loop.post(ProcessEnded(name, incarnation, STATUS_UNKNOWN, words))
            return
        agent = _Agent(incarnation, os.pidfd_open(popen.pid), popen)
        self._hold(name, agent)

    def _hold(self, name: str, agent: _Agent) -> None:
        self._running[name] = agent
        self.loop.watch(agent.pidfd, lambda: self._ended(name, agent))

    def _ended(self, name: str, agent: _Agent) -> None:
        self.loop.unwatch(agent.pidfd)
        os.close(agent.pidfd)
        if self._running.get(name) is agent:
            del self._running[name]
        path = runs.log_path(self.context.directory, name, agent.incarnation)
        if agent.popen is not None:
            status = agent.popen.wait()
        else:
            said = exit_code(path)
            status = STATUS_UNKNOWN if said is None else said
        self.loop.post(ProcessEnded(name, agent.incarnation, status, last_lines(path)))

    def _kill(self, effect: KillAgent) -> None:
        agent = self._running.get(effect.name)
        if agent is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(agent.pidfd, signal.SIGKILL)
