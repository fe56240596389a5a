"""Whether a run directory is the run's own: not a copy of it, and under its own name.

Sockets and the servers' states are found by the run's id, which is the name of its directory. Who
acts on a copy reaches the daemons of the original and removes what is theirs; who brings it back
goes on with states that are ahead of it. So every command that acts on a run asks `require_own`
first (`select.own`). Who only looks may look at a copy of a run that had ended (`select.look`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, TimedOut
from dlctl.runs import database, paths
from dlctl.runs.snapshot import ENDED, Snapshot, Unreadable, is_here
from dlctl.util import notes, processes, values
from dlctl.util.flock import is_locked_within


class Copied(Unreadable):
    """Of a directory that is not the run's own: it was copied, or restored from a backup."""

    def __init__(self, directory: Path, original: Path | None) -> None:
        """original: where the run is, if that is known."""
        known = "nobody knows where its run is" if original is None else f"the run is in {original}"
        super().__init__(directory, f"this directory is a copy: {known}", str(directory))


def place(directory: Path) -> dict[str, Any]:
    """What is on record of where a run is: a copy has another inode."""
    return {"path": os.path.realpath(directory), "inode": directory.stat().st_ino}


def check_database(directory: Path) -> None:
    """Raises Unreadable naming the damage if run.db is not whole."""
    if said := database.damage(directory):
        text = f"the run's database is damaged: {' '.join(said.split())}"
        raise Unreadable(directory, text, str(directory / database.FILE))


def check(snapshot: Snapshot) -> None:
    """Raises DlctlError as `require_own`, and for a directory that was moved while daemons worked
    in it: they go by its old path, and nobody would find them.
    """
    require_own(snapshot)
    directory, before = snapshot.directory, _recorded(snapshot).get("path")
    if not isinstance(before, str) or before == os.path.realpath(directory):
        return
    rows = [{**snapshot.run, "name": "coordinator"}, *filter(is_here, snapshot.daemons)]
    for row in processes.living(rows):
        raise DlctlError(
            f"{row['name']} lives and works in {before}, from where this directory was moved",
            where=str(directory),
            hint=f"dlctl stop -j {directory}",
        )


def require_own(snapshot: Snapshot) -> None:
    """Raises Copied for a copy, and DlctlError for a directory that was renamed; see above. One
    that was moved is the run's own, whether or not the run lives, and so is the only one that there
    is of a run that had ended.
    """
    directory, run_id = snapshot.directory, _run_id(snapshot)
    original, is_known = original_of(snapshot), "inode" in _recorded(snapshot)
    if original is not None or (is_known and not (_is_itself(snapshot) or _had_ended(snapshot))):
        raise Copied(directory, original)
    if run_id != directory.name:
        own = directory.parent / run_id
        raise DlctlError(
            f'this is the run {run_id}, but its directory is called "{directory.name}"',
            where=str(directory),
            hint=f"ls -ld {own}" if os.path.lexists(own) else f"mv {directory} {own}",
        )


def is_copy(snapshot: Snapshot) -> bool:
    """Whether this is a copy of a run that had not ended: one that had is as good as the run, but
    for one under another name beside it, as a backup is.
    """
    is_renamed = _run_id(snapshot) != snapshot.directory.name
    return (is_renamed or not _had_ended(snapshot)) and original_of(snapshot) is not None


def require_current(snapshot: Snapshot) -> None:
    """Raises Copied for a copy of a run that had not ended: what it says may be old, and its
    processes are those of the original, which live or die without a word here.
    """
    if not _had_ended(snapshot) and (original := original_of(snapshot)) is not None:
        raise Copied(snapshot.directory, original)


def _had_ended(snapshot: Snapshot) -> bool:
    return snapshot.run.get("state") in ENDED


def original_of(snapshot: Snapshot) -> Path | None:
    """Where the run is of which this directory is a copy; None if it is the run's own, or if nobody
    knows where that is.
    """
    directory, run_id = snapshot.directory, _run_id(snapshot)
    if _is_itself(snapshot):
        return None
    recorded = str(_recorded(snapshot).get("path") or directory)
    known = Path(recorded), directory.parent / run_id, (paths.index_dir() / run_id).resolve()
    others = (p for p in known if (p / database.FILE).exists() and not p.samefile(directory))
    return next(others, None)


def _is_itself(snapshot: Snapshot) -> bool:
    """Whether this is the directory that is on record, wherever it has been moved to. One of which
    nothing is on record is not known to be.
    """
    with suppress(OSError):
        return bool(snapshot.directory.stat().st_ino == _recorded(snapshot).get("inode"))
    return False


def _run_id(snapshot: Snapshot) -> str:
    found = snapshot.run.get("run_id")
    return found if isinstance(found, str) else snapshot.directory.name


def _recorded(snapshot: Snapshot) -> Mapping[str, Any]:
    """The run's `place`; {} if it has none."""
    found = snapshot.run.get("place")
    return found if isinstance(found, Mapping) else {}


# ---------------------------------------------------------------- one command at a time


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Only one command at a time brings a run back. Raises DlctlError if another one does it."""
    with ExitStack() as held:
        try:
            held.enter_context(paths.held(directory))
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
            where=str(snapshot.directory / paths.LOCK),
            hint=f"dlctl status -j {snapshot.run_id}",
        )


def has_unknown_coordinator(snapshot: Snapshot) -> bool:
    """Whether somebody holds this run who is not on record, or was not when `snapshot` was made."""
    if processes.is_alive(snapshot.run.get("pid"), snapshot.run.get("pid_start")):
        return False
    try:
        descriptor = os.open(snapshot.directory / paths.LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# ---------------------------------------------------------------- one start of a job at a time
# Only one command at a time starts a job: the next one then finds that it runs.
#
# The lock is a file of its own, beside the index by which runs are found. The job file will not do:
# NFS refuses to lock a file that is not open for writing, and a job file may not be writable.
#
#     locks/<hash of the job file's path>


HELD_S = 600.0
"""For another command: it may be checking a large checkpoint, or waiting for daemons to end."""
TELL_S = 1.0
NO_LOCKS = (
    "have this directory writable, and where files can be locked; XDG_STATE_HOME says where it is, "
    "and with it by which names runs are found"
)


@contextmanager
def starting(file: Path, timeout_s: float = HELD_S) -> Iterator[None]:
    """Nobody else of this user starts the job of this file meanwhile.

    Raises TimedOut if somebody is still at it after `timeout_s`, and DlctlError if nothing can be
    locked there.
    """
    path = lock_path(file)
    with ExitStack() as opened:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            opened.callback(os.close, descriptor)
            if not is_locked_within(min(TELL_S, timeout_s), descriptor):
                notes.note("waiting for another command that starts this job")
                if not is_locked_within(timeout_s - TELL_S, descriptor):
                    raise TimedOut(
                        f"another command has been starting {values.path(file)} for "
                        f"{values.duration(timeout_s)}",
                        where=str(path),
                        hint="dlctl ps",
                    )
        except OSError as error:
            why = error.strerror or error
            raise DlctlError(
                f"cannot lock the job: {why}", where=str(path), hint=NO_LOCKS
            ) from error
        yield


def lock_path(file: Path) -> Path:
    """One for each job file, by whatever way it is named."""
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()
    return paths.index_dir().parent / "locks" / name[:32]
