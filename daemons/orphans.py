"""Processes that nobody looks after any more end, whatever happened to those who started them.

An agent ends its daemons when its coordinator is gone, and the coordinator ends the daemons of an
agent that is gone. Here is what remains: both are gone, or the coordinator itself comes to its end.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from daemons.loop import Loop
from dlctl import processes, rundb
from dlctl.machine import StopRequested

log = logging.getLogger("dlctl")
EXIT_S = 5.0
"""For daemons that have been told to end; then they are killed."""


def end_without_parents(loop: Loop, directory: Path) -> None:
    """From now on: stop this daemon when both its agent and the run's coordinator are gone."""

    def stop() -> None:
        loop.post(StopRequested("the agent and the coordinator are gone"))

    def agent_is_gone() -> None:
        run = rundb.read(directory)
        log.warning("the agent is gone; the coordinator is to end the run")
        if processes.is_alive(run.get("pid"), run.get("pid_created")):
            _when_gone(loop, run["pid"], stop)
        else:
            stop()

    _when_gone(loop, os.getppid(), agent_is_gone)


def _when_gone(loop: Loop, pid: int, call: Callable[[], None]) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        call()
        return

    def ended() -> None:
        loop.unwatch(pidfd)
        os.close(pidfd)
        call()

    loop.watch(pidfd, ended)


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
