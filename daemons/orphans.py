"""Processes that nobody looks after any more end, whatever happened to those who started them.

An agent starts its coordinator again, and the coordinator its agents. Here is what remains: both
are gone, or the coordinator itself comes to its end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from daemons.loop import Loop
from dlctl import processes, rundb
from dlctl.errors import DlctlError
from dlctl.launch import local
from dlctl.roles.effects import CoordinatorGone

log = logging.getLogger("dlctl")
LOOK_S = 5.0
"""Between two looks whether coordinator and agent are there."""
EXIT_S = 5.0
"""For daemons that have been told to end; then they are killed."""


def watch_parents(loop: Loop, directory: Path) -> Callable[[], None]:
    """A chore that tells the machine when neither the coordinator nor an agent is there any more.

    Both are started again by the other one; only together they stay away, until somebody comes.
    """
    look_at = 0.0

    def chore() -> None:
        nonlocal look_at
        if time.monotonic() < look_at:
            return
        look_at = time.monotonic() + LOOK_S
        try:
            run = rundb.read(directory)
        except (DlctlError, sqlite3.Error) as error:
            log.warning("cannot read the run's database: %s", error)
            return
        agents = [row for row in run["daemons"] if row.get("role") == "agent"]
        if not processes.living([*agents, run]) and not _is_led(directory):
            loop.post(CoordinatorGone())

    return chore


def _is_led(directory: Path) -> bool:
    """Whether there is a coordinator or an agent that nobody has put on record (yet)."""
    found = list(local.living(directory))
    for daemon in found:
        os.close(daemon.pidfd)
    return any(daemon.role in ("agent", "coordinator") for daemon in found)


def end_all(directory: Path, db: rundb.RunDb) -> None:
    """See to it that all daemons of a run that is over end, and put that on record.

    They have been told to; those that do not listen any more are killed. What is on record may not
    be all: they are looked for.
    """
    found = [daemon for daemon in local.living(directory) if daemon.pid != os.getpid()]
    left = _end([daemon for daemon in found if daemon.role != "coordinator"])
    for daemon in found:
        os.close(daemon.pidfd)
    if left:
        log.error("could not end %s", ", ".join(sorted(left)))
    rows = [row for row in db.daemons() if row.get("pid") and row["name"] not in left]
    try:
        for row in rows:
            db.put_daemon(row["name"], {**row, "state": "stopped", "pid": None})
        db.commit()
    except sqlite3.OperationalError as error:  # `status` looks for the processes by itself
        log.error("cannot write the run's database: %s", error)


def _end(daemons: list[local.Living]) -> set[str]:
    """Wait for their ends, then kill those that are left. Names of those that live even so."""
    left = _wait(daemons, EXIT_S)
    if left:
        log.warning("nobody watched their end: %s", ", ".join(daemon.name for daemon in left))
    for daemon in left:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(daemon.pidfd, signal.SIGKILL)
    return {daemon.name for daemon in _wait(left, EXIT_S)}


def _wait(daemons: list[local.Living], timeout_s: float) -> list[local.Living]:
    """Those that have not ended in time. A pidfd can be read when its process has ended."""
    until = time.monotonic() + timeout_s
    left = {daemon.pidfd: daemon for daemon in daemons}
    poll = select.poll()
    for pidfd in left:
        poll.register(pidfd, select.POLLIN)
    while left and (remaining_s := until - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(1000 * remaining_s):
            poll.unregister(pidfd)
            del left[pidfd]
    return list(left.values())
