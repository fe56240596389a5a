"""The launcher for this machine: processes, each the leader of its own session.

They outlive the shell and the process that started them; Ctrl-C in a terminal does not reach them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dlctl import processes
from dlctl.launch import base
from dlctl.rundb import RunDb


def start_coordinator(directory: Path) -> subprocess.Popen[bytes]:
    """Start the coordinator of a prepared run directory, and put on record which process it is."""
    with closing(RunDb(directory)) as db:
        incarnation = db.run().get("incarnation", 0) + 1
        db.put_run(incarnation=incarnation)
        db.commit()
        process = start(directory, "coordinator", "coordinator", incarnation, "")
        try:
            db.put_run(pid=process.pid, pid_start=processes.start_of(process.pid))
            db.commit()
        except BaseException:
            process.kill()
            process.wait()
            raise
    return process


def start(
    directory: Path, role: str, name: str, incarnation: int, control: str
) -> subprocess.Popen[bytes]:
    """Start one daemon, detached. Raises OSError."""
    log = base.open_log(directory, name, incarnation)
    try:
        return subprocess.Popen(
            base.argv(role, directory, name, incarnation, control),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=base.environment(role, directory, name, incarnation),
            start_new_session=True,
        )
    finally:
        os.close(log)


class Living(NamedTuple):
    """A daemon of a run that is there now."""

    role: str
    name: str
    incarnation: int
    pid: int
    start: str
    """With the pid it says for ever which process this is (`processes.start_of`)."""

    def row(self) -> dict[str, Any]:
        """As `processes` takes it."""
        return {"name": self.name, "pid": self.pid, "pid_start": self.start}


def living(directory: Path) -> Iterator[Living]:
    """The daemons of a run on this machine, known by their command lines.

    A process that a daemon has forked has the same command line, but leads no session.
    """
    for pid in psutil.pids():
        start = processes.start_of(pid)
        known = base.parse_argv(processes.command_line(pid, start), directory)
        if start is not None and known is not None and _is_ours(pid):
            yield Living(*known, pid, start)


def _is_ours(pid: int) -> bool:
    """Whether this process is of our user, and leads a session."""
    try:
        return os.getsid(pid) == pid and psutil.Process(pid).uids().real == os.getuid()
    except (psutil.Error, OSError):
        return False


class Local:
    """Agents on this machine."""

    def start_agent(
        self, directory: Path, name: str, incarnation: int, control: str
    ) -> subprocess.Popen[bytes]:
        return start(directory, "agent", name, incarnation, control)
