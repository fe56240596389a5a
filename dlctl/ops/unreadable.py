"""Runs whose database cannot be read: what is still there, and the way on.

Their checkpoints are files of their own. A new run that begins with the newest one is the way on.
"""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dlctl.errors import DlctlError
from dlctl.runs import checkpoints, database, lock, select
from dlctl.runs.snapshot import Unreadable, load, newest_whole
from dlctl.util import hints, values

if TYPE_CHECKING:
    from dlctl.launch import local


def explained(error: Unreadable) -> Unreadable:
    """The same error with what is still there, and the next commands."""
    directory = error.directory
    where = error.where or str(directory / database.FILE)
    if (original := lock.original_of(directory)) is not None:
        copy = f"{error.message}\n  this directory is a copy, and the run is in {original}"
        return Unreadable(directory, copy, where, lock.where_to_look(original))
    saved, ways_on = _saved(directory)
    told, next_steps = [error.message, saved], [error.hint, *ways_on]
    if there := [found.name for found in living(directory)]:
        told.append(f"daemons of it live: {', '.join(there)}")
        next_steps.insert(0, _ending(directory))
    next_steps.append(anew(job_file(directory)))
    return Unreadable(directory, "\n  ".join(told), where, hints.either(*next_steps))


def _ending(directory: Path) -> str:
    """How to end the daemons of a run; one that is led, as far as it can be read, saves itself."""
    typed = shlex.quote(values.path(directory))
    with suppress(DlctlError):
        run = load(directory)
        if run.is_live and run.coordinator_pid is not None:
            return hints.told(f"dlctl stop -j {typed}", "ends the run with a checkpoint")
    return hints.told(f"dlctl stop --kill -j {typed}", "ends them")


def _saved(directory: Path) -> tuple[str, list[str]]:
    """(what is there of checkpoints, what can be done). Their bytes are not read: `start` does."""
    found = newest_whole(directory)
    if found is not None:
        step, path = values.count(found[1]["step"]), shlex.quote(values.path(found[0]))
        start = f"dlctl start --from {path} {job_file(directory)}"
        return f"its newest checkpoint is still there: step {step}, {path}", [
            hints.told(start, f"a new run goes on from step {step}"),
            hints.told(f"dlctl checkpoint export {path}", f"the model as of step {step}"),
        ]
    if count := len(checkpoints.finished(directory)):
        verify = f"dlctl checkpoint verify -j {shlex.quote(values.path(directory))}"
        return f"and of its {count} checkpoints none is whole", [verify]
    return "and it has no checkpoint", []


def anew(job_file: str) -> str:
    """`job_file` as one types it."""
    return hints.told(f"dlctl start --fresh {job_file}", "begins anew, at step 0")


def job_file(directory: Path) -> str:
    """As one types it: the file beside the runs that is as the run's copy, or the only one."""
    files = sorted(directory.resolve().parents[1].glob("*.toml"))
    same = [file for file in files if select.is_started_from(directory, file)] or files
    return shlex.quote(values.path(same[0])) if len(same) == 1 else "JOBFILE"


def living(directory: Path) -> list[local.Living]:
    """Its daemons on this machine, known by their command lines."""
    from dlctl.launch import local

    return list(local.living(directory))


def damaged(words: Iterable[str], error: Exception) -> DlctlError | None:
    """What to say if a command has come upon a damaged page of a database: of which run, and what
    next; None if no run is damaged. `words`: of its command line, which may name the run.
    """
    if not isinstance(error, sqlite3.DatabaseError):
        return None
    named = set(words)
    known = select.directories()[::-1]
    for directory in sorted(known, key=lambda directory: directory.name not in named):
        try:
            lock.check_database(directory)
        except Unreadable as found:
            return explained(found)
    return None
