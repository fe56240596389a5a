"""The coordinator: one per run, held to that by a lock on the run directory."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from daemons import orphans, process
from daemons.coordinator.past import read_past
from daemons.coordinator.records import Records
from daemons.lastwords import last_lines
from daemons.loop import Loop
from daemons.transport import address_for
from dlctl import registry, runs
from dlctl.errors import DlctlError
from dlctl.launch.local import Local
from dlctl.roles.coordinator import Coordinator
from dlctl.roles.effects import ProcessEnded
from dlctl.roles.journal import KillAgent, LaunchAgent
from dlctl.rundb import RunDb

log = logging.getLogger("dlctl")


class Agents:
    """The agents that this coordinator has placed."""

    def __init__(self, context: process.Context, loop: Loop, control: str) -> None:
        self.context = context
        self.loop = loop
        self.control = control
        self.launcher: Any = Local()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def launch(self, effect: LaunchAgent) -> None:
        directory = self.context.directory
        agent = self.launcher.start_agent(directory, effect.name, effect.incarnation, self.control)
        self._running[effect.name] = agent
        pidfd = os.pidfd_open(agent.pid)

        def ended() -> None:
            self.loop.unwatch(pidfd)
            os.close(pidfd)
            words = last_lines(runs.log_path(directory, effect.name, effect.incarnation))
            status = agent.wait()
            self.loop.post(ProcessEnded(effect.name, effect.incarnation, status, words))

        self.loop.watch(pidfd, ended)

    def kill(self, effect: KillAgent) -> None:
        agent = self._running.get(effect.name)
        if agent is not None and agent.poll() is None:
            agent.send_signal(signal.SIGKILL)


def coordinate(context: process.Context) -> int:
    directory, job = context.directory, context.job
    lock = _lock(directory)
    db = RunDb(directory)
    try:
        loop = Loop(context.log_handler.rotate_if_full)
        loop.stop_on_signals()
        network = job.network
        address = address_for(directory.name, "control", network.transport, network.port)
        control = loop.transport.listen(address)
        Records(directory, db, loop)
        agents = Agents(context, loop, control)
        loop.perform(LaunchAgent, agents.launch)
        loop.perform(KillAgent, agents.kill)
        created = psutil.Process().create_time()
        db.put_run(control=control, pid=os.getpid(), pid_created=created, started_at=time.time())
        db.commit()
        algorithm = registry.load("algorithms", job.algorithm.name)
        machine = Coordinator(directory.name, job, context.key, algorithm, read_past(directory, db))
        code = loop.run(machine)
    except DlctlError as error:
        _write_end(db, state="failed", reason=process.in_words(error), ended_at=time.time())
        raise
    finally:
        orphans.end_all(db)
        runs.remove_sockets(directory.name)
        db.close()
        os.close(lock)
    return code


def _write_end(db: RunDb, **keys: Any) -> None:
    try:
        db.put_run(**keys)
        db.commit()
    except sqlite3.OperationalError as error:  # the disk is full; the log may say it
        log.error("cannot write the run's database: %s", error)


def _lock(directory: Path) -> int:
    """Hold the run directory for as long as this process lives. Raises DlctlError if it is held."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DlctlError(
            "another coordinator has this run", where=str(directory), hint="dlctl status"
        ) from None
    return descriptor


process.main("coordinator", coordinate)
