"""The agent on the coordinator's machine restarts a coordinator that has died.

The coordinator is found by its command line: a full disk may keep it out of the run's database. If
it exits before the run has ended, the agent restarts it. Two coordinators at once are harmless: the
lock on the run directory lets only one of them work.
A coordinator that hangs or is paused (SIGSTOP) holds that lock, so the agent kills it. Its
heartbeat is the time of the lock file, which it touches every second, and not messages: a failed
link is no reason to kill it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

from daemons import parent_watch
from daemons.loop import Loop
from dlctl.errors import DlctlError
from dlctl.job import config
from dlctl.launch import local
from dlctl.roles.protocol.effects import CoordinatorGone, RestartCoordinator
from dlctl.runs import database, paths
from dlctl.runs.database import ENDED
from dlctl.util import processes, regular
from dlctl.wire.machine import StopRequested

log = logging.getLogger("dlctl")
AWAY_S = 3.0
"""A longer gap between two looks (one per second): this process was paused, and perhaps all were.
"""


class Supervision:
    def __init__(
        self, directory: Path, loop: Loop, still_s: float, servers: config.Servers
    ) -> None:
        """`still_s`: the heartbeat timeout of the coordinator."""
        self.directory = directory
        self.servers = servers
        self.loop = loop
        self.still_s = still_s
        self._started: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._lock = -1
        """The coordinator's lock file, held open to detect its removal."""
        self._finds_it_ended = False
        self._beat = 0
        """Modification time of the lock file; `_beat_at`: when it changed."""
        self._beat_at = self._looked_at = time.monotonic()
        loop.perform(RestartCoordinator, self._restart)

    def begin(self) -> None:
        """Watch the running coordinator."""
        with contextlib.suppress(OSError):
            self._lock = regular.descriptor(self.directory / paths.LOCK)
        self._watch()

    def _running(self) -> local.Living | None:
        """The running coordinator: the oldest one, because later ones do not get the lock and
        exit.
        """
        found = [each for each in local.living(self.directory) if each.role == "coordinator"]
        return max(found, key=lambda each: processes.age_s(each.start) or 0.0, default=None)

    def _watch(self) -> None:
        running = self._running()
        pidfd = processes.hold(running.pid, running.start) if running is not None else None
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
        """A chore: kill an unresponsive coordinator, so that another one can replace it."""
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
            if why := paths.refusal(self.directory):  # Then the file's time means nothing.
                log.warning("cannot determine whether the coordinator works: %s", why)
                return
            log.warning("no heartbeat of the coordinator for %.0f s: killing it", self.still_s)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _gone(self) -> None:
        if self._started is not None:
            self._started.poll()  # Reap this child.
        self._finds_it_ended = self._is_removed() or self._state() in ENDED
        if self._finds_it_ended:
            self.loop.post(StopRequested("the run is over"))
        else:
            self.loop.post(CoordinatorGone())

    def close(self) -> None:
        """Clean up for a coordinator that died after the end of the run."""
        if not self._finds_it_ended:
            return
        if self._is_removed():
            parent_watch.remove_leftovers(self.directory, "stopped", self.servers)
            return
        with contextlib.suppress(BlockingIOError), paths.held(self.directory):
            state = self._state()  # Read again under the lock: it may have been resumed before.
            if state in ENDED:
                parent_watch.remove_leftovers(self.directory, state, self.servers)

    def _is_removed(self) -> bool:
        """Whether the run directory was removed, so no coordinator can lead it."""
        try:
            return database.is_removed(self.directory, self._lock)
        except OSError:  # Unknown.
            return False

    def _state(self) -> str:
        try:
            return str(database.read(self.directory).get("state"))
        except (DlctlError, sqlite3.Error) as error:
            log.error("cannot read the run's database: %s", error)
            return ""

    def _restart(self, _: RestartCoordinator) -> None:
        try:
            if self._is_removed() or database.read(self.directory).get("state") in ENDED:
                self._gone()
                return
            if self._running() is None:
                self._started = local.start_coordinator(self.directory, may_be_full=True)
            self._watch()
        except (DlctlError, sqlite3.Error, OSError) as error:
            log.error("cannot start the coordinator: %s", error)
            self.loop.post(CoordinatorGone())
