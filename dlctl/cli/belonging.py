"""Whether a run directory is the run's own: not a copy of it, under its own name, and readable.

Sockets and the servers' states are found by the run's id, which is the name of its directory. Who
acts on a copy reaches the daemons of the original and removes what is theirs; who brings it back
goes on with states that are ahead of it. So every command that acts on a run asks `require_own`
first (`pick.own`). What only looks, or touches no file outside the directory, takes a copy, too.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlctl.cli import console, values
from dlctl.cli.snapshot import COPY as STATE_OF_COPY
from dlctl.cli.snapshot import ENDED, UNKNOWN, Snapshot, is_here
from dlctl.errors import DlctlError
from dlctl.runs import database, paths
from dlctl.util import processes

COPY = "a copy of a run cannot take its place: its daemons are found by the name of the run"


def place(directory: Path) -> dict[str, Any]:
    """What is on record of where a run is: a copy has another inode."""
    return {"path": os.path.realpath(directory), "inode": directory.stat().st_ino}


def check_database(directory: Path, *, read_all: bool = True) -> None:
    """Raises Unreadable naming the damage if run.db is not whole, with what is still there.

    `read_all`: see `unreadable.explained`.
    """
    if said := database.damage(directory):
        from dlctl.cli import unreadable

        path = directory / database.FILE
        text = f"the run's database is damaged: {' '.join(said.split())}"
        damage = DlctlError(text, where=str(path))
        raise unreadable.explained(directory, damage, read_all=read_all)


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
        console.warn(f"{where} is a copy: {seen.reason}; what is known of it here may be old")


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
