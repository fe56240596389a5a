"""The runs that this user knows: those in ./runs, and those in the index of all that were started.

One broken database must not hide all other runs, and a copy of a run's directory not the run.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, NotFound, UsageError
from dlctl.runs import lock, paths
from dlctl.runs.snapshot import Snapshot, Unreadable, load, read_job, started
from dlctl.util import hints, notes

UNREADABLE = "unreadable"
"""State of a run whose database cannot be read."""


def directories() -> list[Path]:
    """Of all runs, the last started one last."""
    here = Path("runs")
    local = [d.resolve() for d in here.iterdir() if paths.is_run(d)] if here.is_dir() else []
    return sorted({*local, *paths.all_runs()}, key=lambda d: (started(d), d.name, d))


def nearest() -> list[Snapshot]:
    """Those in ./runs; all, if none is there: who works in a project means its runs, and must not
    end those of another one. Copies are among them only if there is nothing else.
    """
    found = directories()
    if here := without_copies(all_of(filter(is_here, found))):
        return here
    everywhere = all_of(found)
    return without_copies(everywhere) or everywhere


def is_here(directory: Path) -> bool:
    return directory.parent == Path("runs").resolve()


def load_any(directory: Path) -> Snapshot:
    """A run; of one that cannot be read only what is known without its database, as `UNREADABLE`.

    Raises NotFound if `directory` is no run.
    """
    try:
        return load(directory)
    except Unreadable as error:
        job = read_job(directory)
        known = {"name": _name(job.get("job")), "algorithm": _name(job.get("algorithm"))}
        run = {key: value for key, value in known.items() if isinstance(value, str)}
        return Snapshot(directory, run, [], UNREADABLE, error.message, False, time.time())


def _name(section: Any) -> Any:
    return section.get("name") if isinstance(section, dict) else None


def all_of(directories: Iterable[Path]) -> list[Snapshot]:
    """The same of all that are runs."""
    found = []
    for directory in directories:
        try:
            found.append(load_any(directory))
        except DlctlError:
            continue
    return found


def without_copies(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """Those that nobody knows to be a copy of another one: the processes of a copy are the
    original's, and no command can do anything for it that it cannot do for the original.
    """
    return [snapshot for snapshot in snapshots if not lock.is_copy(snapshot)]


def job_file(path: Path) -> str:
    """How a job file is known: a link keeps its own name, because the task lies beside it."""
    return str(path.parent.resolve() / path.name)


def of_job(file: str, name: str) -> list[Snapshot]:
    """All runs of the job `name` in this file (see `job_file`), the last started one last.

    "dlctl start" takes that one up again.
    """
    wanted = {"job_file": file, "name": name}
    same = [s for s in all_of(directories()) if {key: s.run.get(key) for key in wanted} == wanted]
    return without_copies(same)


# ---------------------------------------------------------------- one of them
# Which run a command is about.


LISTED_MAX = 8


def look(job: str | None, *, every_page: bool = True) -> Snapshot:
    """The run that `-j/--job` or $DLCTL_JOB names; else the only one that runs, else the newest:
    of those in ./runs, and if there are none, of all.

    `job` is a run id, a job's name (its newest run, by the same rule), a run directory, or a job
    file. `every_page`: its database has to be whole; who shows files needs hardly anything of it.

    Raises NotFound with what there is, UsageError if several runs could be meant, Unreadable if its
    database cannot be read, or is damaged (see `load`), and DlctlError for a copy of a run that had
    not ended.
    """
    snapshot = load(directory(job), every_page=every_page)
    lock.require_current(snapshot)
    return snapshot


def own(job: str | None) -> Snapshot:
    """The same for a command that acts on the run. Raises DlctlError for any copy, for that would
    be to act on the original (see `dlctl.runs.lock`).
    """
    snapshot = load(own_directory(job), every_page=True)
    lock.require_own(snapshot)
    return snapshot


def own_directory(job: str | None) -> Path:
    """The same as `directory`. Raises DlctlError instead of going on to the run of another place if
    what lies in ./runs is a copy: in a copied project, that is what its user means.
    """
    found = directory(job)
    if job and (job == found.name or _is_path(job)):
        return found
    if not is_here(found):
        for run in all_of(filter(is_here, directories())):
            if not job or job == run.run.get("name"):
                lock.require_own(run)
    return found


def directory(job: str | None) -> Path:
    """The same as a directory, whose database may be damaged. In a project that has no run of its
    own it is said where it lies.
    """
    found = silently(job)
    if not job and Path("runs").is_dir() and not is_here(found):
        where = str(found.parent)
        notes.note(f"no run of its own is in ./runs: {found.name} is in {where}")
    return found


def silently(job: str | None) -> Path:
    """The same without a word, for the completion of a command line."""
    if job:
        return _named(job)
    found = nearest()
    live = [snapshot for snapshot in found if snapshot.is_live]
    if len(live) > 1:
        raise _ambiguous("several jobs run", live)
    if not found:
        raise NotFound(
            "there are no runs yet", hint=hints.either("dlctl run JOBFILE", "dlctl init DIR")
        )
    return (live or found)[-1].directory


def _named(job: str) -> Path:
    path = Path(job)
    if _is_run(path):
        return path.resolve()
    found = directories()
    if same := [directory for directory in found if directory.name == job]:
        runs = all_of(same)
        readable = [run for run in runs if run.state != UNREADABLE]
        return _the_one(f'several runs are called "{job}"', readable or runs)
    if path.is_file():
        return _the_one(f'several runs of "{path}" are at work', _of_job_file(path, found))
    named = [run for run in all_of(found) if run.run.get("name") == job]
    if not named:
        raise _unknown(job, found)
    here = [run for run in without_copies(named) if is_here(run.directory)]
    return _the_one(f'several jobs are called "{job}"', here or named)


def _the_one(what: str, runs: list[Snapshot]) -> Path:
    """The one that lives, else the newest. Raises UsageError if several live, or if they are of
    several projects. Copies are among them only if there is nothing else.
    """
    own = without_copies(runs) or runs
    live = [run for run in own if run.is_live]
    if len(live) > 1 or (not live and len({run.directory.parent for run in own}) > 1):
        raise _ambiguous(what, live or own)
    return (live or own)[-1].directory


def _of_job_file(path: Path, found: list[Path]) -> list[Snapshot]:
    wanted = job_file(path)
    same = [
        run
        for run in all_of(found)
        if run.run.get("job_file") == wanted
        or (run.state == UNREADABLE and is_started_from(run.directory, path))
    ]
    if not same:
        raise NotFound(f'no run was started from "{path}"', hint=f"dlctl start {path}")
    return same


def is_started_from(directory: Path, file: Path) -> bool:
    """Whether a run has a copy of this job file as it is now."""
    try:
        return (directory / "job.toml").read_bytes() == file.read_bytes()
    except OSError:
        return False


def _is_run(path: Path) -> bool:
    return path.is_dir() and paths.is_run(path)


def _is_path(job: str) -> bool:
    """Whether it is by its place that a run, or its job file, is named."""
    return Path(job).is_file() or _is_run(Path(job))


def _unknown(job: str, found: list[Path]) -> NotFound:
    names = [directory.name for directory in reversed(found)]
    jobs = [name.rpartition("-")[0] for name in names]
    close = difflib.get_close_matches(job, [*names, *jobs], n=1)
    where = "DLCTL_JOB" if os.environ.get("DLCTL_JOB") == job else None
    what = f'no run or job is called "{job}"{meant(close, names)}'
    return NotFound(what, where=where, hint="dlctl ps")


def meant(close: Sequence[str], names: Sequence[str]) -> str:
    """How a message about an unknown name ends: with the one that comes `close`, or with all."""
    return f'; did you mean "{close[0]}"?' if close else f"; known: {_listed(names)}"


def _ambiguous(what: str, snapshots: Sequence[Snapshot]) -> UsageError:
    same = len({s.run_id for s in snapshots}) < len(snapshots)
    names = [str(s.directory) if same else s.run_id for s in snapshots]
    hint = hints.told("dlctl ps", "shows them; -j and one of these names says which one is meant")
    return UsageError(f"{what}: {_listed(names)}", hint=hint)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else ""
    return (", ".join(names[:LISTED_MAX]) or "none") + more
