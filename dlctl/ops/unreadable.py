"""Runs that cannot be resumed: the database cannot be read, or the directory is a copy. Their
checkpoints are separate files, so a new run can start from the newest one.
"""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dlctl.errors import DlctlError
from dlctl.runs import database, lineage, lock, select
from dlctl.runs.snapshot import Unreadable, check_database, load
from dlctl.util import hints, values

if TYPE_CHECKING:
    from dlctl.launch import local


def explained(error: Unreadable) -> Unreadable:
    """The same error with the next command."""
    directory, where = error.directory, error.where or str(error.directory / database.FILE)
    text = error.message
    if (found := lock.origin(select.load_any(directory))) is not None:
        text = f"this directory is a copy: {found[1]}"
        return Unreadable(directory, text, str(directory), _beside(directory, found[0]))
    if there := [found.name for found in living(directory)]:
        text += f"\n  daemons of it are alive: {', '.join(there)}"
        return Unreadable(directory, text, where, _ending(directory))
    return Unreadable(directory, text, where, next_command(directory, job_file(directory)))


def _beside(directory: Path, original: Path) -> str:
    """What to do with a copy: use its original, or start a new run from its checkpoint."""
    has_run, has_saved = (
        (original / database.FILE).exists(),
        lineage.newest_good(directory, hashes=False) is not None,
    )
    look = f"{'dlctl status -j' if has_run else 'pgrep -af'} {shlex.quote(str(original))}"
    return hints.either(look, next_command(directory, job_file(directory)) if has_saved else "")


def _ending(directory: Path) -> str:
    """How to stop the daemons of a run; a coordinator, if the run is readable, saves first."""
    typed = shlex.quote(values.path(directory))
    with suppress(DlctlError):
        run = load(directory)
        if run.is_live and run.coordinator_pid is not None:
            return hints.told(f"dlctl stop -j {typed}", "ends the run with a checkpoint")
    return hints.told(f"dlctl stop --kill -j {typed}", "ends them")


def next_command(directory: Path, job_file: str) -> str:
    """How to continue without the database; `job_file` as typed in a shell. Does not read the
    checkpoint's bytes: `start` does that.
    """
    found = lineage.newest_good(directory, hashes=False)
    if found is None:
        return anew(job_file)
    path, step = shlex.quote(values.path(found[0])), values.count(found[1]["step"])
    return hints.told(f"dlctl start --from {path} {job_file}", f"resumes from step {step}")


def anew(job_file: str) -> str:
    """`job_file` as typed in a shell."""
    return hints.told(f"dlctl start --fresh {job_file}", "starts over at step 0")


def job_file(directory: Path) -> str:
    """As typed in a shell: the file beside the runs that equals the run's copy, or the only one."""
    files = sorted(directory.resolve().parents[1].glob("*.toml"))
    same = [file for file in files if select.is_started_from(directory, file)] or files
    return shlex.quote(values.path(same[0])) if len(same) == 1 else "JOBFILE"


def living(directory: Path) -> list[local.Living]:
    """Its live daemons on this machine, identified by their command lines."""
    from dlctl.launch import local

    return list(local.living(directory))


def damaged(words: Iterable[str], error: Exception) -> DlctlError | None:
    """The error for a command that hit a damaged page of a database: which run, and the next
    command; None if no run is damaged. `words`: of its command line, which may name the run.
    """
    if not isinstance(error, sqlite3.DatabaseError):
        return None
    named = set(words)
    known = select.directories()[::-1]
    for directory in sorted(known, key=lambda directory: directory.name not in named):
        try:
            check_database(directory)
        except Unreadable as found:
            return explained(found)
    return None
