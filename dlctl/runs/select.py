"""Finding runs: those in ./runs, and those in the index of all runs that this user started.

A broken database must not hide the other runs, nor a copied directory its original.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from dlctl.errors import DlctlError, NotFound, UsageError
from dlctl.runs import lock, paths, reach
from dlctl.runs.snapshot import Snapshot, Unreadable, check_records, load, read_job, started
from dlctl.util import hints, notes, regular
from dlctl.util.did_you_mean import meant

UNREADABLE = "unreadable"
"""State of a run whose database cannot be read."""


def directories() -> list[Path]:
    """The directories of all runs, the last started one last; but for simulated ones."""
    return [directory for directory in _all() if not paths.is_simulated(directory)]


def _all() -> list[Path]:
    here = {d.resolve() for d in Path("runs").glob("*") if paths.is_run(d)}
    return sorted({*here, *paths.all_runs()}, key=lambda d: (started(d), d.name, d))


def is_here(directory: Path) -> bool:
    return directory.parent == Path("runs").resolve()


def load_any(directory: Path) -> Snapshot:
    """A run; for an unreadable run, what is known without its database, with state `UNREADABLE`.

    Raises NotFound if `directory` is not a run.
    """
    try:
        return load(directory)
    except Unreadable as error:
        job, run = read_job(directory), {}
        with suppress(KeyError, TypeError):
            run = {"name": str(job["job"]["name"]), "algorithm": str(job["algorithm"]["name"])}
        return Snapshot(directory, run, [], UNREADABLE, error.message, False, time.time())


def all_of(directories: Iterable[Path]) -> list[Snapshot]:
    """`load_any` of all directories that are runs."""
    found = []
    for directory in directories:
        try:
            found.append(load_any(directory))
        except DlctlError:
            continue
    return found


def without_copies(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """The runs without known copies: the processes of a copy are the original's, and no command can
    do more for it than for the original.
    """
    return [snapshot for snapshot in snapshots if lock.origin(snapshot) is None]


def job_file(path: Path) -> str:
    """The canonical path of a job file: a link keeps its own name, as the task is beside it."""
    return str(path.parent.resolve() / path.name)


def of_job(file: str, name: str) -> list[Snapshot]:
    """All runs of the job `name` in this file (see `job_file`), the last started one last.

    "dlctl start" resumes that one.
    """
    wanted = {"job_file": file, "name": name}
    same = [s for s in all_of(directories()) if {key: s.run.get(key) for key in wanted} == wanted]
    return without_copies(same)


# ---------------------------------------------------------------- one run
# Which run a command refers to.


LISTED_MAX = 8


def look(job: str | None, *, is_any: bool = False) -> Snapshot:
    """The run that `-j/--job` or $DLCTL_JOB names; else the only running one, else the newest: of
    those in ./runs, and if there are none, of all.

    `job` is a run id, a job's name (its newest run, by the same rule), a run directory, or a job
    file. `is_any`: also a run whose database is damaged (see `load_any`).

    Raises NotFound with the known runs, UsageError if the choice is ambiguous, Unreadable if the
    database cannot be read or, of an ended run, is damaged, and DlctlError for a directory that is
    not the run's own (see `dlctl.runs.lock`).
    """
    chosen = directory(job)
    reach.follow(chosen)
    snapshot = (load_any if is_any else load)(chosen)
    if not (is_any or snapshot.is_live):
        check_records(snapshot.directory)
    lock.require_own(snapshot)
    return snapshot


def directory(job: str | None, *, quiet: bool = False) -> Path:
    """The directory of that run; its database may be damaged. In a project without a run of its
    own, notes where the run is, unless `quiet`.
    """
    if job:
        return _named(job)
    known = directories()
    # A command in a project refers to its runs, and must not stop those of another project.
    near = all_of(filter(is_here, known)) or all_of(known)
    if not near:
        raise NotFound(
            "there are no runs yet", hint=hints.either("dlctl run JOBFILE", "dlctl init DIR")
        )
    chosen = _the_one("several jobs are running", near, is_any_project=True)
    if not quiet and Path("runs").is_dir() and not is_here(chosen):
        notes.note(f"./runs has no run: using {chosen.name} in {chosen.parent}")
    return chosen


def _named(job: str) -> Path:
    path = Path(job)
    if path.is_dir() and paths.is_run(path):
        return path.resolve()
    found = directories()
    if same := [directory for directory in _all() if directory.name == job]:
        return _the_one(f'several runs are called "{job}"', all_of(same))
    known = all_of(found)
    if path.is_file():
        of_file = [run for run in known if _is_of_file(run, path)]
        if not of_file:
            raise NotFound(f'no run was started from "{path}"', hint=f"dlctl start {path}")
        return _the_one(f'several runs of "{path}" are running', of_file)
    named = [run for run in known if run.run.get("name") == job]
    if not named:
        raise _unknown(job, found)
    here = [run for run in named if is_here(run.directory)]
    return _the_one(f'several jobs are called "{job}"', here or named)


def _the_one(what: str, runs: list[Snapshot], *, is_any_project: bool = False) -> Path:
    """The live run, else the newest. Raises UsageError if several are live, or, unless
    `is_any_project`, from several projects. Copies are considered only if there is nothing else.
    """
    own = without_copies(runs) or runs
    live = [run for run in own if run.is_live]
    projects = {run.directory.parent for run in own}
    if len(live) > 1 or (not live and not is_any_project and len(projects) > 1):
        raise _ambiguous(what, live or own)
    return (live or own)[-1].directory


def _is_of_file(run: Snapshot, path: Path) -> bool:
    if run.state == UNREADABLE:
        return is_started_from(run.directory, path)
    return run.run.get("job_file") == job_file(path)


def is_started_from(directory: Path, file: Path) -> bool:
    """Whether a run has a copy of this job file's current content."""
    try:
        return regular.read_bytes(directory / "job.toml") == regular.read_bytes(file)
    except OSError:
        return False


def _unknown(job: str, found: list[Path]) -> NotFound:
    names = [directory.name for directory in reversed(found)]
    jobs = [name.rpartition("-")[0] for name in names]
    where = "DLCTL_JOB" if os.environ.get("DLCTL_JOB") == job else None
    what = f'no run or job is called "{job}"{meant(job, dict.fromkeys([*names, *jobs]))}'
    hint = "dlctl ps"
    if "://" in job:
        hint = hints.command(f"dlctl checkpoint ls {job}", "also verify and export take an address")
    return NotFound(what, where=where, hint=hint)


def _ambiguous(what: str, snapshots: Sequence[Snapshot]) -> UsageError:
    same = len({s.run_id for s in snapshots}) < len(snapshots)
    names = [str(s.directory) if same else s.run_id for s in snapshots[:LISTED_MAX]]
    hint = hints.command("dlctl ps", "lists them; choose one with -j")
    return UsageError(f"{what}: {', '.join(names)}", hint=hint)
