"""Processes that nobody looks after any more end, whatever happened to those who started them.

An agent starts its coordinator again, and the coordinator its agents. Here is what remains: both
are gone, or the coordinator itself comes to its end.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from daemons.loop import Loop
from dlctl import processes, rundb
from dlctl.errors import DlctlError
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
        if not processes.living([*agents, run]):
            loop.post(CoordinatorGone())

    return chore


def end_all(db: rundb.RunDb) -> None:
    """See to it that all daemons of a run that is over end, and put that on record.

    They have been told to; those that do not listen any more are killed.
    """
    rows = processes.living(db.daemons())
    if not rows:
        return
    _, left = processes.end(processes.wait(rows, EXIT_S), 0.0)
    ended = [row for row in rows if row["name"] not in left]
    log.warning("nobody watched their end: %s", ", ".join(row["name"] for row in ended))
    if left:
        log.error("could not end %s", ", ".join(left))
    try:
        for row in ended:
            db.put_daemon(row["name"], {**row, "state": "stopped", "pid": None})
        db.commit()
    except sqlite3.OperationalError as error:  # `status` looks for the processes by itself
        log.error("cannot write the run's database: %s", error)
