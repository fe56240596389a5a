"""Whether a run directory is the run's own: not a copy of it, under its own name, and readable.

Sockets and the servers' states are found by the run's id, which is the name of its directory. A
copy would talk to the daemons of the original, or go on with states that are ahead of it.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from dlctl import processes, rundb, runs
from dlctl.cli import values
from dlctl.cli.snapshot import Snapshot
from dlctl.errors import DlctlError

COPY = "a copy of a run cannot take its place: its daemons are found by the name of the run"


def place(directory: Path) -> dict[str, Any]:
    """What is on record of where a run is: a copy has another inode."""
    return {"path": os.path.realpath(directory), "inode": directory.stat().st_ino}


def check_database(directory: Path, *, read_all: bool = True) -> None:
    """Raises Unreadable naming the damage if run.db is not whole, with what is still there.

    `read_all`: see `unreadable.explained`. A write-ahead log that was cut off is no damage: its
    last transactions are missing then.
    """
    path = directory / rundb.FILE
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as db:
            found = [str(row[0]) for row in db.execute("PRAGMA quick_check(3)")]
    except sqlite3.Error as error:
        found = [str(error)]
    if found != ["ok"]:
        said = "; ".join(" ".join(text.split()) for text in found)
        from dlctl.cli import unreadable

        damage = DlctlError(f"the run's database is damaged: {said}", where=str(path))
        raise unreadable.explained(directory, damage, read_all=read_all)


def check(snapshot: Snapshot) -> bool:
    """Whether the directory is where it was when the run was started last.

    False if it was moved to another file system, or restored from a backup: what servers have kept
    may be of another time then. Raises DlctlError for a copy, and for a directory that was renamed.
    """
    directory = snapshot.directory
    run_id = snapshot.run.get("run_id")
    if isinstance(run_id, str) and run_id != directory.name:
        raise _under_another_name(directory, run_id)
    for name, other in _work_elsewhere(snapshot):
        raise _copy(directory, other, f"{name} lives and works in {other}")
    recorded = snapshot.run.get("place")
    if not isinstance(recorded, Mapping):
        link = (runs.index_dir() / directory.name).resolve()
        if link != directory.resolve() and (link / rundb.FILE).exists():
            raise _copy(directory, link, f"the run is in {link}")
        return True
    if recorded.get("inode") == directory.stat().st_ino:
        return True
    original = Path(str(recorded.get("path")))
    with suppress(OSError):
        if original.stat().st_ino == recorded.get("inode"):
            raise _copy(directory, original, f"the run is in {original}")
    return False


def _under_another_name(directory: Path, run_id: str) -> DlctlError:
    """A directory that was renamed can get its name back, unless the run is there as well."""
    text = f'this is the run {run_id}, but its directory is called "{directory.name}"'
    own = directory.parent / run_id
    link = (runs.index_dir() / run_id).resolve()
    for other in (own, link):
        if (other / rundb.FILE).exists() and not other.samefile(directory):
            where = values.path(other)
            return DlctlError(
                f"{text}: it is a copy, and the run is in {where}; {COPY}",
                where=str(directory),
                hint=f"dlctl status -j {other}",
            )
    if os.path.lexists(own):
        return DlctlError(
            f"{text}, and something else is in its place",
            where=str(directory),
            hint=f"ls -ld {own}",
        )
    return DlctlError(text, where=str(directory), hint=f"mv {directory} {own}")


def _work_elsewhere(snapshot: Snapshot) -> Iterator[tuple[str, Path]]:
    """(name, directory) of living daemons that are on record here and work somewhere else."""
    rows = [{**snapshot.run, "name": "coordinator"}, *snapshot.daemons]
    for row in rows:
        words = processes.command_line(row.get("pid"), row.get("pid_start"))
        if len(words) != 8 or not words[3].startswith("daemons."):
            continue
        other = Path(words[4])
        if not other.exists() or not other.samefile(snapshot.directory):
            yield str(row["name"]), other


def _copy(directory: Path, original: Path, why: str) -> DlctlError:
    return DlctlError(
        f"this directory is a copy: {why}; {COPY}",
        where=str(directory),
        hint=f"dlctl recover -j {original}",
    )


# ---------------------------------------------------------------- one command at a time


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Only one command at a time brings a run back. Raises DlctlError if another one does it."""
    with ExitStack() as held:
        try:
            held.enter_context(runs.held(directory))
        except BlockingIOError:
            raise DlctlError(
                f"another command is bringing {directory.name} back just now",
                where=str(directory),
                hint=f"dlctl wait --for ready -j {directory.name}",
            ) from None
        yield


def refuse_unknown_coordinator(snapshot: Snapshot) -> None:
    """Raises DlctlError if a coordinator holds this run that is not the one on record."""
    if has_unknown_coordinator(snapshot):
        raise DlctlError(
            f"a coordinator that is not on record holds {snapshot.run_id}",
            where=str(snapshot.directory / runs.LOCK),
            hint=f"dlctl status -j {snapshot.run_id}",
        )


def has_unknown_coordinator(snapshot: Snapshot) -> bool:
    """Whether somebody holds this run who is not on record, or was not when `snapshot` was made."""
    if processes.is_alive(snapshot.run.get("pid"), snapshot.run.get("pid_start")):
        return False
    try:
        descriptor = os.open(snapshot.directory / runs.LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
