"""Runs that cannot be gone on with: the database cannot be read, or the directory is a copy. Their
checkpoints are files of their own, and a new run that begins with the newest one is the way on.
"""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dlctl.errors import DlctlError
from dlctl.runs import database, lock, select
from dlctl.runs.snapshot import Unreadable, load, newest_whole
from dlctl.util import hints, values

if TYPE_CHECKING:
    from dlctl.launch import local


def explained(error: Unreadable) -> Unreadable:
    """The same error with the next command."""
    directory, where = error.directory, error.where or str(error.directory / database.FILE)
    text, original = error.message, lock.original_of(select.load_any(directory))
    if isinstance(error, lock.Copied):
        return Unreadable(directory, text, where, _beside(directory, original))
    if original is not None:
        text += f"\n  this directory is a copy, and the run is in {original}"
        return Unreadable(directory, text, where, _beside(directory, original))
    if there := [found.name for found in living(directory)]:
        text += f"\n  daemons of it live: {', '.join(there)}"
        return Unreadable(directory, text, where, _ending(directory))
    return Unreadable(directory, text, where, way_on(directory, job_file(directory)))


def _beside(directory: Path, original: Path | None) -> str:
    """What to do with a copy: go to its run, or begin a new one with its checkpoint."""
    look = "" if original is None else f"dlctl status -j {shlex.quote(str(original))}"
    if original is not None and newest_whole(directory) is None:
        return look
    return hints.either(look, way_on(directory, job_file(directory)))


def _ending(directory: Path) -> str:
    """How to end the daemons of a run; one that is led, as far as it can be read, saves itself."""
    typed = shlex.quote(values.path(directory))
    with suppress(DlctlError):
        run = load(directory)
        if run.is_live and run.coordinator_pid is not None:
            return hints.told(f"dlctl stop -j {typed}", "ends the run with a checkpoint")
    return hints.told(f"dlctl stop --kill -j {typed}", "ends them")


def way_on(directory: Path, job_file: str) -> str:
    """How to go on without its database; `job_file` as one types it. The checkpoint's bytes are not
    read: `start` does that.
    """
    found = newest_whole(directory)
    if found is None:
        return anew(job_file)
    path, step = shlex.quote(values.path(found[0])), values.count(found[1]["step"])
    return hints.told(f"dlctl start --from {path} {job_file}", f"goes on from step {step}")


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
