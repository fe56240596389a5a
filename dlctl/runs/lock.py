"""Whether a run directory is the run's own: not a copy of it, and under its own name.

Sockets and the servers' states are found by the run's id, which is the name of its directory. A
command that acted on a copy would reach the daemons of the original and remove their files; a
recovered copy would resume with states that are ahead of it. So every command that acts on a run
calls `require_own` first (`select.own`). A read-only command accepts a copy of a run that had ended
(`select.look`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import time
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
    """The directory is a copy of a run: its daemons are found by the name of the run."""

    def __init__(self, directory: Path, original: Path, why: str) -> None:
        """original: the run's own directory. why: the evidence."""
        super().__init__(directory, f"this directory is a copy: {why}", str(directory))
        self.original = original


def place(directory: Path) -> dict[str, Any]:
    """The recorded location of a run: a copy has another inode."""
    return {"path": os.path.realpath(directory), "inode": directory.stat().st_ino}


def check_database(directory: Path) -> None:
    """Raises Unreadable, with the damage, if run.db is damaged."""
    if damage := database.damage(directory):
        text = f"the run's database is damaged: {' '.join(damage.split())}"
        raise Unreadable(directory, text, str(directory / database.FILE))


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
    """Raises Copied for a copy, and DlctlError for a renamed directory; see above. A moved
    directory is the run's own, live or not.
    """
    directory, run_id = snapshot.directory, _run_id(snapshot)
    if (found := _origin(snapshot)) is not None:
        raise Copied(directory, *found)
    if run_id != directory.name:
        own = directory.parent / run_id
        raise DlctlError(
            f'this is the run {run_id}, but its directory is called "{directory.name}"',
            where=str(directory),
            hint=f"ls -ld {own}" if os.path.lexists(own) else f"mv {directory} {own}",
        )


def is_copy(snapshot: Snapshot) -> bool:
    """Whether this is a copy of a run that had not ended. A copy of one that had ended counts as
    the run, except under another name, as a backup.
    """
    is_renamed = _run_id(snapshot) != snapshot.directory.name
    return (is_renamed or not _had_ended(snapshot)) and _origin(snapshot) is not None


def require_current(snapshot: Snapshot) -> None:
    """Raises Copied for a copy of a run that had not ended: its state may be stale, and its
    processes are those of the original, which do not report to the copy.
    """
    if not _had_ended(snapshot) and (found := _origin(snapshot)) is not None:
        raise Copied(snapshot.directory, *found)


def _had_ended(snapshot: Snapshot) -> bool:
    return snapshot.run.get("state") in ENDED


def original_of(directory: Path) -> Path | None:
    """The run directory of which this is a copy with an unreadable database; None if it is the
    run's own, if known. A live run is often damaged in copying.
    """
    found = _origin(Snapshot(directory, {}, [], "unknown", "", False, time.time()))
    return None if found is None else found[0]


def where_to_look(original: Path) -> str:
    """The command that shows the run of which there is a copy."""
    if _has_run(original):
        return f"dlctl status -j {shlex.quote(str(original))}"
    return f"pgrep -af {shlex.quote(str(original))}"


def _origin(snapshot: Snapshot) -> tuple[Path, str] | None:
    """(the original's directory, the evidence) if this directory is a copy; None if not."""
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
    """Only one command at a time recovers a run. Raises DlctlError if another one holds it."""
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
# Only one command at a time starts a job: the next one then finds it running.
#
# The lock is a separate file, beside the index of runs. The job file cannot be locked instead: NFS
# refuses to lock a file that is not open for writing, and a job file may not be writable.
#
#     locks/<hash of the job file's path>


HELD_S = 600.0
"""For another command: it may be verifying a large checkpoint, or waiting for daemons to exit."""
NOTE_AFTER_S = 1.0
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
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            opened.callback(os.close, descriptor)
            if not is_locked_within(min(NOTE_AFTER_S, timeout_s), descriptor):
                notes.note("waiting for another command that is starting this job")
                if not is_locked_within(timeout_s - NOTE_AFTER_S, descriptor):
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
    """One lock per job file, whatever path names it."""
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()
    return paths.index_dir().parent / "locks" / name[:32]
