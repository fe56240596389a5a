"""Whether a run directory is the run's own: not a copy of it, and under its own name.

Sockets and the servers' states are found by the run's id, which is the name of its directory. A
command that acted on a copy would reach the daemons of the original and remove their files; a
recovered copy would resume with states that are ahead of it; one that shows a copy would show
processes that do not report to it. So every command calls `require_own` first (`select.look`),
except those about checkpoints, which are the same in a copy.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, TimedOut, os_errors_as
from dlctl.runs import database, paths
from dlctl.runs.snapshot import Snapshot, Unreadable, is_here
from dlctl.util import notes, processes, regular, values
from dlctl.util.flock import is_locked, is_locked_within


def place(directory: Path) -> dict[str, Any]:
    """The recorded location of a run: a copy has another inode."""
    return {"path": os.path.realpath(directory), "inode": directory.stat().st_ino}


def check(snapshot: Snapshot) -> bool:
    """Whether the directory is where it was when the run was started last.

    False if it was moved to another file system, or restored from a backup: what servers have
    stored elsewhere may be of another time then. Raises DlctlError as `require_own`, and for a
    directory that was moved while daemons ran in it: they use its old path, so commands would not
    find them.
    """
    require_own(snapshot)
    directory = snapshot.directory
    for name, other in _running_elsewhere(snapshot):
        raise DlctlError(
            f"{name} is running in {other}, from where this directory was moved",
            where=str(directory),
            hint=f"dlctl stop -j {directory}",
        )
    recorded = _recorded(snapshot)
    return not recorded or _is_at(directory, recorded)


def require_own(snapshot: Snapshot) -> None:
    """Raises Unreadable for a copy, and DlctlError for a renamed directory; see above. A moved
    directory is the run's own, live or not.
    """
    directory, run_id = snapshot.directory, _run_id(snapshot)
    if (found := origin(snapshot)) is not None:
        raise Unreadable(directory, f"this directory is a copy: {found[1]}", is_copy=True)
    if run_id != directory.name:
        own = directory.parent / run_id
        raise DlctlError(
            f'this is the run {run_id}, but its directory is called "{directory.name}"',
            where=str(directory),
            hint=f"ls -ld {own}" if os.path.lexists(own) else f"mv {directory} {own}",
        )


def origin(snapshot: Snapshot) -> tuple[Path, str] | None:
    """(the original's directory, the evidence) if this directory is a copy; None if not, or if its
    database cannot be read and there is no other evidence. A live run is often damaged in copying.
    """
    directory, run_id, recorded = snapshot.directory, _run_id(snapshot), _recorded(snapshot)
    is_itself = run_id == directory.name and _is_at(directory, recorded)
    for name, other in _running_elsewhere(snapshot):
        # Where the run was moved from, a checkpoint or a log may have been written since.
        if _has_run(other) or not is_itself:
            return other, f"{name} is running in {other}"
    original = Path(str(recorded.get("path")))
    known = [original] if _is_at(original, recorded) else []
    if not is_itself:
        known += filter(
            _has_run, (directory.parent / run_id, (paths.index_dir() / run_id).resolve())
        )
    for other in known:
        if not other.samefile(directory):
            return other, f"the run is in {other}"
    return None


def _run_id(snapshot: Snapshot) -> str:
    found = snapshot.run.get("run_id")
    return found if isinstance(found, str) else snapshot.directory.name


def _recorded(snapshot: Snapshot) -> Mapping[str, Any]:
    """The run's `place`; {} if it has none."""
    found = snapshot.run.get("place")
    return found if isinstance(found, Mapping) else {}


def _has_run(directory: Path) -> bool:
    return (directory / database.FILE).exists()


def _is_at(directory: Path, recorded: Mapping[str, Any]) -> bool:
    """Whether this is the directory of a `place`, wherever it has been moved to."""
    with suppress(OSError):
        return bool(directory.stat().st_ino == recorded.get("inode"))
    return False


def _running_elsewhere(snapshot: Snapshot) -> Iterator[tuple[str, Path]]:
    """(name, directory) of live daemons on record here that run in another directory.

    Daemons of another host rightly do, also if that host is this machine.
    """
    rows = [{**snapshot.run, "name": "coordinator"}, *filter(is_here, snapshot.daemons)]
    for row in rows:
        words = processes.command_line(row.get("pid"), row.get("pid_start"))
        if len(words) != 8 or not words[3].startswith("daemons."):
            continue
        other = Path(words[4])
        if not other.exists() or not other.samefile(snapshot.directory):
            yield str(row["name"]), other


# ---------------------------------------------------------------- one command at a time


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Hold the lock for the recovery of a run. Raises DlctlError if another command has it."""
    with ExitStack() as held:
        try:
            held.enter_context(paths.held(directory))
        except BlockingIOError:
            raise DlctlError(
                f"another command is recovering {directory.name}",
                where=str(directory),
                hint=f"dlctl wait --for ready -j {directory.name}",
            ) from None
        yield


def refuse_unknown_coordinator(snapshot: Snapshot) -> None:
    """Raises DlctlError if a coordinator other than the recorded one holds this run."""
    if has_unknown_coordinator(snapshot):
        raise DlctlError(
            f"a coordinator that is not on record holds {snapshot.run_id}",
            where=str(snapshot.directory / paths.LOCK),
            hint=f"dlctl status -j {snapshot.run_id}",
        )


def has_unknown_coordinator(snapshot: Snapshot) -> bool:
    """Whether a process holds this run that was not on record when `snapshot` was made."""
    if processes.is_alive(snapshot.run.get("pid"), snapshot.run.get("pid_start")):
        return False
    with suppress(OSError):
        return is_locked(snapshot.directory / paths.LOCK)
    return False


# ---------------------------------------------------------------- one start of a job at a time
# Only one command at a time starts a job: the next one then finds it running.
#
# The lock is a separate file, beside the index of runs. The job file cannot be locked instead: NFS
# refuses to lock a file that is not open for writing, and a job file may not be writable.
#
#     locks/<hash of the job file's path>


HELD_S = 600.0
"""Time to wait for another command, which may verify a large checkpoint, or await exits."""
NO_LOCKS = (
    "this directory must be writable, on a file system with locks; XDG_STATE_HOME moves it, and "
    "with it the index of runs"
)


@contextmanager
def starting(file: Path, timeout_s: float = HELD_S) -> Iterator[None]:
    """Exclude other commands of this user from starting the job of this file.

    Raises TimedOut if another command still holds the lock after `timeout_s`, and DlctlError if
    files cannot be locked there.
    """
    path = lock_path(file)
    with ExitStack() as opened:
        with os_errors_as("cannot lock the job", path, NO_LOCKS):
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            descriptor = regular.descriptor(path, flags, 0o600)
            opened.callback(os.close, descriptor)
            if not is_locked_within(0.0, descriptor):
                notes.note("waiting for another command that is starting this job")
                if not is_locked_within(timeout_s, descriptor):
                    raise TimedOut(
                        f"another command has been starting {values.path(file)} for "
                        f"{values.duration(timeout_s)}",
                        where=str(path),
                        hint="dlctl ps",
                    )
        yield


def lock_path(file: Path) -> Path:
    """One lock per job file, whatever path names it."""
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()
    return paths.index_dir().parent / "locks" / name[:32]
