"""The child processes of an agent: started by it, or adopted from a previous agent.

A process is held by a pidfd from its start or adoption: a signal never reaches another process that
reuses its pid.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from daemons.agent.nursery import Nursery
from daemons.agent.oom import OomWatch
from daemons.agent.template import Forked, Template, reap
from daemons.log_tail import await_printed, exit_code, last_lines
from daemons.loop import Loop
from dlctl.errors import DlctlError
from dlctl.launch import commands, local
from dlctl.launch.base import Credentials
from dlctl.roles.agent.children import ProcessStarted
from dlctl.roles.coordinator.members.crash_loops import NO_ROOM, UNSAID
from dlctl.roles.protocol.effects import ProcessEnded, SignalProcess, StartProcess
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.runs import paths
from dlctl.util import processes
from dlctl.wire.messages import ProcessExited, Spawn, Spawned


@dataclass(slots=True)
class _Child:
    pid: int
    pidfd: int
    process: subprocess.Popen[bytes] | Forked | None
    """The process; None: a previous agent has started it."""
    is_killed: bool = False
    """The agent has killed the process, so no other cause needs to be found."""


class Place(Protocol):
    """Where the processes of a host run, and whom they talk to."""

    @property
    def directory(self) -> Path: ...

    @property
    def control(self) -> str: ...

    @property
    def credentials(self) -> Credentials: ...


class Children:
    def __init__(
        self,
        context: Place,
        loop: Loop,
        prepare: Callable[[Spawn], None] = lambda _: None,
        templates: Iterable[Template] = (),
    ) -> None:
        """prepare: called before a process is started. Raises OSError or DlctlError. templates:
        each forks the daemons of its role.
        """
        self.context = context
        self.prepare = prepare
        self.nurseries = {each.role: Nursery(each, loop, self._start_now) for each in templates}
        self.loop = loop
        self._running: dict[tuple[str, int], _Child] = {}
        self._oom = OomWatch()
        loop.chores.append(self._oom.look)
        if self.nurseries:
            loop.chores.append(lambda: reap(self._is_known))
        loop.perform(StartProcess, self._start)
        loop.perform(SignalProcess, self._signal)

    def _is_known(self, pid: int) -> bool:
        return any(child.pid == pid for child in self._running.values())

    def _start(self, effect: StartProcess) -> None:
        spawn = effect.spawn
        try:
            self.prepare(spawn)
        except (OSError, DlctlError) as error:
            self._cannot_start(spawn, error)
            return
        nursery = self.nurseries.get(spawn.role)
        if nursery is None or not nursery.takes(spawn):
            self._start_now(spawn)

    def _start_now(self, spawn: Spawn) -> None:
        directory, control = self.context.directory, self.context.control
        name, incarnation = spawn.name, spawn.incarnation
        credentials = Credentials(spawn.secret, self.context.credentials.coordinator)
        try:
            process: subprocess.Popen[bytes] | Forked | None = None
            if nursery := self.nurseries.get(spawn.role):
                process = nursery.template.start(name, incarnation, control, credentials)
            if process is None:
                process = local.start(
                    directory, spawn.role, name, incarnation, control, credentials
                )
        except (OSError, DlctlError) as error:
            self._cannot_start(spawn, error)
            return
        self._hold(name, incarnation, _Child(process.pid, os.pidfd_open(process.pid), process))
        self.loop.post(ProcessStarted(Spawned(name, incarnation, process.pid)))

    def _cannot_start(self, spawn: Spawn, error: OSError | DlctlError) -> None:
        words = (f"cannot start it: {error}",)
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        cause = NO_ROOM if is_full else ""
        exited = ProcessExited(spawn.name, spawn.incarnation, 1, words, cause)
        self.loop.post(ProcessEnded(exited))

    def adopt(self) -> tuple[Spawned, ...]:
        """Watch the daemons of this run that are already running on this machine."""
        found = []
        for daemon in local.living(self.context.directory):
            if daemon.role in ("agent", "coordinator"):
                continue
            pidfd = processes.hold(daemon.pid, daemon.start)
            if pidfd is not None:
                self._hold(daemon.name, daemon.incarnation, _Child(daemon.pid, pidfd, None))
                found.append(Spawned(daemon.name, daemon.incarnation, daemon.pid))
                if nursery := self.nurseries.get(daemon.role):
                    nursery.begin_later()
        return tuple(found)

    def _hold(self, name: str, incarnation: int, child: _Child) -> None:
        self._running[name, incarnation] = child
        self._oom.begin(child.pid)
        self.loop.watch(child.pidfd, lambda: self._ended(name, incarnation))

    def _ended(self, name: str, incarnation: int) -> None:
        child = self._running.pop((name, incarnation))
        self.loop.unwatch(child.pidfd)
        os.close(child.pidfd)
        path = paths.log_path(self.context.directory, name, incarnation)
        recorded = exit_code(path)
        status = STATUS_UNKNOWN if recorded is None else recorded
        if child.process is not None:
            # Such as data loaders: every daemon leads its own process group.
            commands.kill_group(child.process)
            status = child.process.wait()
        is_another = status in (-signal.SIGKILL, STATUS_UNKNOWN) and not child.is_killed
        cause = self._oom.cause(child.pid) if is_another else ""
        if status >= 0 and recorded is None:
            cause = UNSAID
        self._oom.forget(child.pid)
        await_printed(path)
        exited = ProcessExited(name, incarnation, status, last_lines(path), cause)
        self.loop.post(ProcessEnded(exited))

    def _signal(self, effect: SignalProcess) -> None:
        child = self._running.get((effect.name, effect.incarnation))
        if child is None:
            for nursery in self.nurseries.values():
                nursery.drop(effect)
        if child is not None:
            child.is_killed |= effect.signal == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.pidfd, effect.signal)
