"""The launcher for this machine: processes, each the leader of its own session.

They outlive the shell and the process that started them, and do not receive Ctrl-C of a terminal.
"""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dlctl.errors import DlctlError
from dlctl.job.config import Host
from dlctl.launch import base
from dlctl.launch.launcher import Launcher, LeftBehind
from dlctl.runs.database import RunDb
from dlctl.util import processes

log = logging.getLogger("dlctl")
BEGUN_S, LOOK_S = 1.0, 0.001
"""Timeout for a started process to have its command line; interval of the checks."""


def start_coordinator(directory: Path, *, may_be_full: bool = False) -> subprocess.Popen[bytes]:
    """Start the coordinator of a prepared run directory, and record its process.

    may_be_full: it replaces a coordinator that died. On a full disk it starts without the record,
    and writes it itself when there is space.
    """
    with closing(RunDb(directory)) as db:
        incarnation = db.run().get("incarnation", 0) + 1
        _put_run(db, may_be_full, incarnation=incarnation)
        process = start(directory, "coordinator", "coordinator", incarnation, "")
        try:
            pid_start = processes.start_of(process.pid)
            _put_run(db, may_be_full, pid=process.pid, pid_start=pid_start)
        except BaseException:
            process.kill()
            process.wait()
            raise
    return process


def _put_run(db: RunDb, may_be_full: bool, **values: Any) -> None:
    try:
        db.put_run(**values)
        db.commit()
    except sqlite3.OperationalError as error:
        db.rollback()
        if not may_be_full:
            raise
        log.warning("cannot write the run's database: %s; the coordinator starts without", error)


def start(
    directory: Path,
    role: str,
    name: str,
    incarnation: int,
    control: str,
    credentials: base.Credentials = base.NO_CREDENTIALS,
) -> subprocess.Popen[bytes]:
    """Start one daemon, detached: `living` finds it from now on. Raises OSError."""
    log = base.open_log(directory, name, incarnation)
    has_loop = base.has_loop(role, directory)
    try:
        process = subprocess.Popen(
            base.argv(role, directory, name, incarnation, control, has_loop=has_loop),
            stdin=subprocess.PIPE if credentials.secret else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=base.environment(role, directory, name, incarnation, has_loop=has_loop),
            start_new_session=True,
        )
    finally:
        os.close(log)
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(credentials.to_bytes())  # Fits the pipe buffer, so this does not block.
    _await_command_line(process)
    return process


def _await_command_line(process: subprocess.Popen[bytes]) -> None:
    """Wait until /proc shows the new command line. Popen returns when exec closes a pipe, which may
    be earlier on a busy machine.
    """
    pid, start, deadline = process.pid, processes.start_of(process.pid), time.monotonic() + BEGUN_S
    while processes.is_alive(pid, start) and not processes.command_line(pid, start):
        if time.monotonic() > deadline:
            return
        time.sleep(LOOK_S)


class Living(NamedTuple):
    """A running daemon of a run."""

    role: str
    name: str
    incarnation: int
    pid: int
    start: str
    """`processes.start_of`: (pid, start) is unique, although pids are reused."""

    def row(self) -> dict[str, Any]:
        """The row that `processes` expects."""
        return {"name": self.name, "pid": self.pid, "pid_start": self.start}


def living(directory: Path) -> Iterator[Living]:
    """The daemons of a run on this machine, identified by their command lines.

    A forked child of a daemon has the same command line, but is not a session leader.
    """
    for pid in psutil.pids():
        start = processes.start_of(pid)
        known = base.parse_argv(processes.command_line(pid, start), directory)
        if start is not None and known is not None and _is_ours(pid):
            yield Living(*known, pid, start)


def kill_all(directory: Path) -> None:
    """Kill the daemons of a run on this machine: asked to end in order, they would stop it."""
    for _ in range(3):  # An agent may have started another one meanwhile.
        for daemon in living(directory):
            processes.send_signal(daemon.pid, daemon.start, signal.SIGKILL)


def _is_ours(pid: int) -> bool:
    """Whether this process belongs to this user and is a session leader."""
    try:
        return os.getsid(pid) == pid and psutil.Process(pid).uids().real == os.getuid()
    except (psutil.Error, OSError):
        return False


@dataclass(slots=True)
class _Agent:
    incarnation: int
    pidfd: int
    popen: subprocess.Popen[bytes] | None
    """None: a previous coordinator has started it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No options: the local launcher needs none."""


class Local(Launcher):
    """All daemons on this machine, under the coordinator's own agent."""

    Options = Options
    title = "this machine"
    noun = "machine"
    takes_hosts = False
    can_ask = False
    outlives = True
    is_reclaimed = False
    copies_files = False

    def agents(
        self,
        directory: Path,
        hosts: Mapping[str, Host],
        watcher: base.Watcher,
        tell: Callable[[base.News], None],
    ) -> base.AgentControl:
        return LocalAgents(directory, watcher, tell)

    def end(
        self, directory: Path, hosts: Mapping[str, Host], grace_s: float, *, purge: bool
    ) -> list[LeftBehind]:
        return []  # There are no other hosts.


class LocalAgents:
    """Agents on this machine, each held by a pidfd: a signal never reaches another process."""

    def __init__(
        self,
        directory: Path,
        watcher: base.Watcher,
        tell: Callable[[base.Ended], None],
    ) -> None:
        self.directory = directory
        self.watcher = watcher
        self.tell = tell
        self._running: dict[str, _Agent] = {}

    def start(self, order: base.StartOrder) -> None:
        for daemon in self._living():
            if daemon.name == order.name:
                log.warning("an older process of %s is still running: killing it", order.name)
                processes.send_signal(daemon.pid, daemon.start, signal.SIGKILL)
        name, incarnation, control, credentials = order
        try:
            popen = start(self.directory, "agent", name, incarnation, control, credentials)
        except OSError as error:
            # Possibly temporary: no memory, no pid, no disk space.
            why = DlctlError(f"cannot start it: {error}")
            self.tell(base.Ended(name, incarnation, None, why))
            return
        self._hold(name, _Agent(incarnation, os.pidfd_open(popen.pid), popen))

    def want(self, names: Collection[str]) -> None:
        """These hosts do not come and go."""

    def kill(self, name: str) -> None:
        if name in self._running:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._running[name].pidfd, signal.SIGKILL)

    def adopt(self, recorded: dict[str, int]) -> dict[str, int]:
        newest = {d.name: d for d in sorted(self._living(), key=lambda d: d.incarnation)}
        for name, daemon in newest.items():
            pidfd = processes.hold(daemon.pid, daemon.start)
            if pidfd is not None:
                self._hold(name, _Agent(daemon.incarnation, pidfd, None))
        return {name: agent.incarnation for name, agent in self._running.items()}

    def look(self) -> None:
        """Nothing to do: no local operation can be overdue."""

    def close(self) -> None:
        """Nothing to do: there are no hosts to release."""

    def _living(self) -> list[Living]:
        return [daemon for daemon in living(self.directory) if daemon.role == "agent"]

    def _hold(self, name: str, agent: _Agent) -> None:
        self._running[name] = agent
        self.watcher.watch(agent.pidfd, lambda: self._ended(name, agent))

    def _ended(self, name: str, agent: _Agent) -> None:
        self.watcher.unwatch(agent.pidfd)
        os.close(agent.pidfd)
        status = agent.popen.wait() if agent.popen is not None else None
        if self._running.get(name) is not agent:
            return  # It was replaced, perhaps with the same incarnation.
        del self._running[name]
        self.tell(base.Ended(name, agent.incarnation, status))
