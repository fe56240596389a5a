"""The agent beside the coordinator sees to it that there is one.

Which process that is stands in the run's database; one that began on a full disk is known by its
command line. When it has ended although the run has not, it is started again. Two at once do no
harm: the lock on the run directory lets only one of them work.
A coordinator that stands still (it is stopped, or hangs) holds that lock: it is killed. That it
works is seen from the time of the lock file, which it touches every second, and not from messages:
a link that fails is no reason to kill it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daemons import parent_watch
from daemons.loop import Loop
from dlctl import config
from dlctl.errors import DlctlError
from dlctl.launch import local
from dlctl.machine import StopRequested
from dlctl.roles.protocol.effects import CoordinatorGone, RestartCoordinator
from dlctl.runs import database, paths
from dlctl.runs.database import ENDED
from dlctl.util import processes

log = logging.getLogger("dlctl")
AWAY_S = 3.0
"""Between two looks, which come every second: we stood still ourselves, and perhaps all did."""


class Supervision:
    def __init__(
        self, directory: Path, loop: Loop, still_s: float, servers: config.Servers
    ) -> None:
        """`still_s`: how long a coordinator may stand still."""
        self.directory = directory
        self.servers = servers
        self.loop = loop
        self.still_s = still_s
        self._started: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._lock = -1
        """The coordinator's lock file: who has it open sees that it is removed."""
        self._finds_it_ended = False
        self._beat = 0
        """The time of the lock file, and since when it is that."""
        self._beat_at = self._looked_at = time.monotonic()
        loop.perform(RestartCoordinator, self._restart)

    def begin(self) -> None:
        """Watch the coordinator that there is."""
        with contextlib.suppress(FileNotFoundError):
            self._lock = os.open(self.directory / paths.LOCK, os.O_RDONLY | os.O_CLOEXEC)
        self._watch(*self._present(database.read(self.directory)))

    def _present(self, run: Mapping[str, Any]) -> tuple[int | None, str | None]:
        """The pid and start of the process that is on record. If that has ended, of another one
        that is there: it could not be put on record, or not yet. The oldest one leads the run: who
        comes later does not get the lock, and ends.
        """
        pid, start = run.get("pid"), run.get("pid_start")
        if processes.is_alive(pid, start):
            return pid, start
        others = [each for each in local.living(self.directory) if each.role == "coordinator"]
        oldest = max(others, key=lambda each: processes.age_s(each.start) or 0.0, default=None)
        return (None, None) if oldest is None else (oldest.pid, oldest.start)

    def _watch(self, pid: int | None, start: str | None) -> None:
        pidfd = processes.hold(pid, start)
        if pidfd is None:
            self._gone()
            return

        def ended() -> None:
            self.loop.unwatch(pidfd)
            os.close(pidfd)
            self._pidfd = -1
            self._gone()

        self._pidfd, self._beat_at = pidfd, time.monotonic()
        self.loop.watch(pidfd, ended)

    def look(self) -> None:
        """A chore: end a coordinator that stands still, so that another one can take its place."""
        now = time.monotonic()
        was_away, self._looked_at = now - self._looked_at > AWAY_S, now
        try:
            beat = (self.directory / paths.LOCK).stat().st_mtime_ns
        except OSError:
            return
        if beat != self._beat or was_away:
            self._beat, self._beat_at = beat, now
        elif self._pidfd >= 0 and now - self._beat_at > self.still_s:
            self._beat_at = now
            if why := paths.refusal(self.directory):  # Then its time says nothing.
                log.warning("nobody sees whether the coordinator works: %s", why)
                return
            log.warning("the coordinator has stood still for %.0f s: it is killed", self.still_s)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _gone(self) -> None:
        if self._started is not None:
            self._started.poll()  # Ours: its end has to be collected.
        self._finds_it_ended = self._is_removed() or self._state() in ENDED
        if self._finds_it_ended:
            self.loop.post(StopRequested("the run is over"))
        else:
            self.loop.post(CoordinatorGone())

    def close(self) -> None:
        """Do what a coordinator that has died after the end of its run has not done any more."""
        if not self._finds_it_ended:
            return
        if self._is_removed():
            parent_watch.remove_leftovers(self.directory, "stopped", self.servers)
            return
        with contextlib.suppress(BlockingIOError), paths.held(self.directory):
            state = self._state()  # Nobody brings it back now, but somebody may have.
            if state in ENDED:
                parent_watch.remove_leftovers(self.directory, state, self.servers)

    def _is_removed(self) -> bool:
        """Whether there is nothing any more that another coordinator could lead."""
        try:
            return database.is_removed(self.directory, self._lock)
        except OSError:  # it cannot be seen
            return False

    def _state(self) -> str:
        try:
            return str(database.read(self.directory).get("state"))
        except (DlctlError, sqlite3.Error) as error:
            log.error("cannot read the run's database: %s", error)
            return ""

    def _restart(self, _: RestartCoordinator) -> None:
        try:
            if self._is_removed():
                self._gone()
                return
            run = database.read(self.directory)
            if run.get("state") in ENDED:
                self._gone()
                return
            pid, start = self._present(run)
            if pid is None:
                self._started = local.start_coordinator(self.directory, may_be_full=True)
                pid, start = self._started.pid, processes.start_of(self._started.pid)
            self._watch(pid, start)
        except (DlctlError, sqlite3.Error, OSError) as error:
            log.error("cannot start the coordinator: %s", error)
            self.loop.post(CoordinatorGone())
