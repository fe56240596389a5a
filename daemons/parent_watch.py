"""Ends orphaned daemons, which have neither a coordinator nor an agent.

An agent restarts its coordinator, and the coordinator its agents. This module handles the remaining
cases: both are gone, or the run itself has ended.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from daemons.loop import Loop
from daemons.process import DaemonContext
from dlctl.job import config
from dlctl.launch import local
from dlctl.roles.protocol.effects import CoordinatorGone
from dlctl.runs import database, kept_shards, paths
from dlctl.util import processes

log = logging.getLogger("dlctl")
LOOK_S = 5.0
"""Interval between two checks whether coordinator and agent are alive."""
ALONE_S = 3 * LOOK_S
"""Without an agent on another machine: the coordinator may be about to place the next one."""
EXIT_S = 5.0
"""Time for daemons to exit after a stop request; then they are killed."""


def watch_parents(loop: Loop, context: DaemonContext) -> Callable[[], None]:
    """A chore that notifies the machine when neither the coordinator nor an agent is alive.

    Each of the two restarts the other one, so only the loss of both is permanent, until a user
    intervenes. On other machines than the coordinator's, only the agent is checked.
    """
    limit_s = 0.0 if context.is_home else ALONE_S
    look_at, led_at = 0.0, time.monotonic()

    def chore() -> None:
        nonlocal look_at, led_at
        now = time.monotonic()
        if now < look_at:
            return
        look_at = now + LOOK_S
        try:
            has_parent = _is_led(context)
        except OSError as error:
            log.warning("cannot determine whether coordinator and agent are alive: %s", error)
            has_parent = True
        if has_parent:
            led_at = now
        elif now - led_at >= limit_s:
            loop.post(CoordinatorGone())

    return chore


def _is_led(context: DaemonContext) -> bool:
    """Whether a coordinator or an agent is running. Raises OSError."""
    if context.is_home:
        # The coordinator's heartbeat, as for its agent: a search of all processes takes longer.
        with suppress(OSError):  # Somebody may have removed it.
            age_s = time.time() - (context.directory / paths.LOCK).stat().st_mtime
            if abs(age_s) < paths.BEAT_LATE_S:
                return True
    living = local.living(context.directory)
    return any(daemon.role in ("agent", "guest", "coordinator") for daemon in living)


def end_all(directory: Path, db: database.RunDb) -> None:
    """Make sure that all daemons of a run that is over have exited, and record that.

    They have received a stop request; unresponsive ones are killed. The record may be incomplete,
    so this searches for the processes.
    """
    found = [daemon.row() for daemon in local.living(directory) if daemon.role != "coordinator"]
    silent = processes.wait(found, EXIT_S)
    if silent:
        log.warning("killing daemons that do not exit: %s", ", ".join(r["name"] for r in silent))
    _, left = processes.end(silent, 0.0)
    if left:
        log.error("could not end %s", ", ".join(left))
    rows = [row for row in db.daemons() if row.get("pid") and row["name"] not in left]
    try:
        for row in rows:
            db.put_daemon(row["name"], {**row, "state": "stopped", "pid": None})
        db.commit()
    except sqlite3.OperationalError as error:  # `status` checks the processes on its own.
        log.error("cannot write the run's database: %s", error)


def remove_leftovers(directory: Path, state: object, servers: config.Servers) -> None:
    """Remove the sockets of a run that ended in this `state`, and its shards if unneeded."""
    paths.remove_sockets(directory.name)
    if state in ("finished", "stopped"):  # Its checkpoint contains everything.
        kept_shards.remove(directory, servers)
