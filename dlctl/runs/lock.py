"""Whether a run directory is the run's own: not a copy of it, under its own name, and readable.

Sockets and the servers' states are found by the run's id, which is the name of its directory. Who
acts on a copy reaches the daemons of the original and removes what is theirs; who brings it back
goes on with states that are ahead of it. So every command that acts on a run asks `require_own`
first (`select.own`). What only looks, or touches no file outside the directory, takes a copy, too.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shlex
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, TimedOut
from dlctl.runs import database, paths
from dlctl.runs.snapshot import COPY as STATE_OF_COPY
from dlctl.runs.snapshot import ENDED, UNKNOWN, Snapshot, Unreadable, is_here
from dlctl.util import notes, processes, values

COPY = "a copy of a run cannot take its place: its daemons are found by the name of the run"


def place(directory: Path) -> dict[str, Any]:
    """What is on record of where a run is: a copy has another inode."""
    return {"path": os.path.realpath(directory), "inode": directory.stat().st_ino}


def check_database(directory: Path) -> None:
    """Raises Unreadable naming the damage if run.db is not whole."""
    if said := database.damage(directory):
        text = f"the run's database is damaged: {' '.join(said.split())}"
        raise Unreadable(directory, text, str(directory / database.FILE))


def check(snapshot: Snapshot) -> bool:
    """Whether the directory is where it was when the run was started last.

    False if it was moved to another file system, or restored from a backup: what servers have kept
    may be of another time then. Raises DlctlError as `require_own`, and for a directory that was
    moved while daemons worked in it: they go by its old path, and nobody would find them.
    """
    require_own(snapshot)
    directory = snapshot.directory
    for name, other in _work_elsewhere(snapshot):
        raise DlctlError(
            f"{name} lives and works in {other}, from where this directory was moved",
            where=str(directory),
            hint=f"dlctl stop -j {directory}",
        )
    recorded = _recorded(snapshot)
    return not recorded or _is_at(directory, recorded)


def require_own(snapshot: Snapshot) -> None:
    """Raises DlctlError for a copy, and for a directory that was renamed; see above. One that was
    moved is the run's own, whether or not the run lives.
    """
    directory, run_id = snapshot.directory, snapshot.run.get("run_id")
    if isinstance(run_id, str) and run_id != directory.name:
        raise _under_another_name(directory, run_id)
    if (found := _elsewhere(snapshot)) is not None:
        raise _copy(directory, *found)


def is_copy(snapshot: Snapshot) -> bool:
    """Whether this is a copy of a run that had not ended: one that had is as good as the run, but
    for one under another name beside it, as a backup is.
    """
    run_id = snapshot.run.get("run_id")
    is_renamed = isinstance(run_id, str) and run_id != snapshot.directory.name
    is_backup = is_renamed and _of_this_name(snapshot.directory, str(run_id)) is not None
    return is_backup or _original(snapshot) is not None


def seen(snapshot: Snapshot) -> Snapshot:
    """The same, for those who say how a run is and what to do. A copy's processes are those of the
    original, and live or die without a word here: whoever judged them would have them ended.
    """
    if (found := _original(snapshot)) is None:
        return snapshot
    original, why = found
    nobody = {"pid": None, "pid_start": None}
    lost = {**nobody, "state": UNKNOWN, "phase": "it is, or was, the original's"}
    return replace(
        snapshot,
        run={**snapshot.run, **nobody},
        daemons=[{**row, **lost} for row in snapshot.daemons],
        state=STATE_OF_COPY,
        reason=why,
        is_live=False,
        coordinator_pid=None,
        beat_age_s=None,
        original=original,
    )


def warn_of_copy(seen: Snapshot) -> None:
    """Say so to who only looks, of what `seen` has called a copy: a process that it is shown to
    have is the original's, and all the rest may have changed since it was made.
    """
    if seen.original is not None:
        where = values.path(seen.directory)
        notes.warn(f"{where} is a copy: {seen.reason}; what is known of it here may be old")


def original_of(directory: Path) -> Path | None:
    """Where the run is of which this is a copy whose database cannot be read; None if it is the
    run's own directory, as far as anybody knows. A run that lives is often damaged in the copying.
    """
    found = _elsewhere(Snapshot(directory, {}, [], "unknown", "", False, time.time()))
    return None if found is None else found[0]


def where_to_look(original: Path) -> str:
    """The command that says how the run is, of which there is a copy."""
    if _has_run(original):
        return f"dlctl status -j {shlex.quote(str(original))}"
    return f"pgrep -af {shlex.quote(str(original))}"


def _original(snapshot: Snapshot) -> tuple[Path, str] | None:
    """As `_elsewhere`; a copy of a run that had ended is as good as the run."""
    return None if snapshot.run.get("state") in ENDED else _elsewhere(snapshot)


def _elsewhere(snapshot: Snapshot) -> tuple[Path, str] | None:
    """(where the run is, how that is known) if this directory is a copy of it; None if not."""
    directory, recorded = snapshot.directory, _recorded(snapshot)
    is_itself = _is_at(directory, recorded)
    for name, other in _work_elsewhere(snapshot):
        # Where the run was moved from, a checkpoint or a log may have been made since.
        if _has_run(other) or not is_itself:
            return other, f"{name} lives and works in {other}"
    original = Path(str(recorded.get("path")))
    link = (paths.index_dir() / directory.name).resolve()
    known = [original] if _is_at(original, recorded) else []
    known += [link] if not is_itself and _has_run(link) else []
    for other in known:
        if not other.samefile(directory):
            return other, f"the run is in {other}"
    return None


def _has_run(directory: Path) -> bool:
    return (directory / database.FILE).exists()


def _recorded(snapshot: Snapshot) -> Mapping[str, Any]:
    """The run's `place`; {} if it has none."""
    found = snapshot.run.get("place")
    return found if isinstance(found, Mapping) else {}


def _is_at(directory: Path, recorded: Mapping[str, Any]) -> bool:
    """Whether this is the directory of a `place`, wherever it has been moved to."""
    with suppress(OSError):
        return bool(directory.stat().st_ino == recorded.get("inode"))
    return False


def _under_another_name(directory: Path, run_id: str) -> DlctlError:
    """A directory that was renamed can get its name back, unless the run is there as well."""
    text = f'this is the run {run_id}, but its directory is called "{directory.name}"'
    if (other := _of_this_name(directory, run_id)) is not None:
        return DlctlError(
            f"{text}: it is a copy, and the run is in {values.path(other)}; {COPY}",
            where=str(directory),
            hint=f"dlctl status -j {other}",
        )
    own = directory.parent / run_id
    if os.path.lexists(own):
        return DlctlError(
            f"{text}, and something else is in its place",
            where=str(directory),
            hint=f"ls -ld {own}",
        )
    return DlctlError(text, where=str(directory), hint=f"mv {directory} {own}")


def _of_this_name(directory: Path, run_id: str) -> Path | None:
    """Where a run of this id is, beside a directory of another name or as far as we know of it."""
    for other in (directory.parent / run_id, (paths.index_dir() / run_id).resolve()):
        if _has_run(other) and not other.samefile(directory):
            return other
    return None


def _work_elsewhere(snapshot: Snapshot) -> Iterator[tuple[str, Path]]:
    """(name, directory) of living daemons that are on record here and work somewhere else.

    Those of another host do so by rights, also if that host is this machine.
    """
    rows = [{**snapshot.run, "name": "coordinator"}, *filter(is_here, snapshot.daemons)]
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
        hint=where_to_look(original),
    )


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


# ---------------------------------------------------------------- onlyone
# Only one command at a time starts a job: the next one then finds that it runs.
#
# The lock is a file of its own, beside the index by which runs are found. The job file will not do:
# NFS refuses to lock a file that is not open for writing, and a job file may not be writable.
#
#     locks/<hash of the job file's path>    pid and host of the command that has it


HELD_S = 600.0
"""For another command: it may be checking a large checkpoint, or waiting for daemons to end."""
TELL_S = 1.0
POLL_S = 0.05
NO_ROOM = "free some space there"
NO_LOCKS = (
    "have this directory writable, and where files can be locked; XDG_STATE_HOME says where it is, "
    "and with it by which names runs are found"
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def starting(file: Path, timeout_s: float = HELD_S) -> Iterator[None]:
    """Nobody else of this user starts the job of this file meanwhile.

    Raises TimedOut if somebody is still at it after `timeout_s`, and DlctlError if nothing can be
    locked there.
    """
    path = lock_path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path, file, timeout_s)
    except OSError as error:
        raise DlctlError(
            f"cannot lock the job: {error.strerror or error}",
            where=str(path),
            hint=NO_ROOM if error.errno in _FULL else NO_LOCKS,
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # What stays is empty of meaning, and locked by nobody.
            path.unlink()
        os.close(descriptor)


def lock_path(file: Path) -> Path:
    """One for each job file, by whatever way it is named."""
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()
    return paths.index_dir().parent / "locks" / name[:32]


def _lock(path: Path, file: Path, timeout_s: float) -> int:
    """A descriptor of the file at `path`, locked. Raises OSError and TimedOut."""
    began, told = time.monotonic(), False
    while (descriptor := _try(path)) is None:
        waited_s = time.monotonic() - began
        if waited_s >= min(TELL_S, timeout_s) and not told:
            told = True
            text = f"waiting for another command that starts this job ({_holder(path)})"
            notes.note(text)
        if waited_s >= timeout_s:
            raise TimedOut(
                f"another command ({_holder(path)}) has been starting {values.path(file)} for "
                f"{values.duration(waited_s)}",
                where=str(path),
                hint="dlctl ps",
            )
        time.sleep(POLL_S)
    with suppress(OSError):  # On a full disk nobody is told who has it.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _try(path: Path) -> int | None:
    """The same, or None if somebody has it, or has just removed it. Raises OSError."""
    descriptor = os.open(path, _OPEN, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _holder(path: Path) -> str:
    """Who has it, as it says itself."""
    try:
        return path.read_text(errors="replace")[:200] or "it has not said which"
    except OSError:
        return "it is just ending"
