"""The agent beside the coordinator sees to it that there is one.

Which process that is stands in the run's database. When it has ended although the run has not, it
is started again. Two at once do no harm: the lock on the run directory lets only one of them work.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
from pathlib import Path

from daemons.loop import Loop
from dlctl import processes, rundb
from dlctl.errors import DlctlError
from dlctl.launch import local
from dlctl.roles.effects import CoordinatorGone, RestartCoordinator
from dlctl.rundb import ENDED

log = logging.getLogger("dlctl")


class Supervision:
    def __init__(self, directory: Path, loop: Loop) -> None:
        self.directory = directory
        self.loop = loop
        self._started: subprocess.Popen[bytes] | None = None
        loop.perform(RestartCoordinator, self._restart)

    def begin(self) -> None:
        """Watch the process that is on record."""
        run = rundb.read(self.directory)
        self._watch(run.get("pid"), run.get("pid_created"))

    def _watch(self, pid: int | None, created: float | None) -> None:
        try:
            pidfd = os.pidfd_open(pid or 0) if pid else -1
        except ProcessLookupError:
            pidfd = -1
        if pidfd < 0 or not processes.is_alive(pid, created):
            self._gone()
            return

        def ended() -> None:
            self.loop.unwatch(pidfd)
            os.close(pidfd)
            self._gone()

        self.loop.watch(pidfd, ended)

    def _gone(self) -> None:
        if self._started is not None:
            self._started.poll()  # Ours: its end has to be collected.
        if self._state() not in ENDED:
            self.loop.post(CoordinatorGone())

    def _state(self) -> str:
        try:
            return str(rundb.read(self.directory).get("state"))
        except (DlctlError, sqlite3.Error) as error:
            log.error("cannot read the run's database: %s", error)
            return ""

    def _restart(self, _: RestartCoordinator) -> None:
        try:
            run = rundb.read(self.directory)
            if run.get("state") in ENDED:
                return
            if not processes.is_alive(run.get("pid"), run.get("pid_created")):
                self._started = local.start_coordinator(self.directory)
                run = rundb.read(self.directory)
            self._watch(run.get("pid"), run.get("pid_created"))
        except (DlctlError, sqlite3.Error, OSError) as error:
            log.error("cannot start the coordinator: %s", error)
            self.loop.post(CoordinatorGone())
