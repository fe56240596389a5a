"""Which run a command is about."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from dlctl.cli import belonging, console, knownruns
from dlctl.cli.snapshot import Snapshot, Unreadable, load
from dlctl.errors import NotFound, UsageError
from dlctl.runs import paths
from dlctl.util import hints

LISTED_MAX = 8


def pick(job: str | None) -> Snapshot:
    """The run that `-j/--job` or $DLCTL_JOB names; else the only one that runs, else the newest:
    of those in ./runs, and if there are none, of all.

    `job` is a run id, a job's name (its newest run, by the same rule), a run directory, or a job
    file. Raises NotFound with what there is, and UsageError if several runs could be meant.
    """
    snapshot = read(directory(job))
    belonging.warn_of_copy(belonging.seen(snapshot))
    return snapshot


def look(job: str | None) -> Snapshot:
    """The same for a command that says how a run is: of a copy it does not know that."""
    return _seen(read(directory(job)))


def skim(job: str | None) -> Snapshot:
    """The same for a command that shows files: of the database it needs hardly anything, so damage
    that can be passed over does not keep it from them.
    """
    return _seen(read(directory(job), every_page=False))


def own(job: str | None) -> Snapshot:
    """The same for a command that acts on the run. Raises DlctlError for a copy as well, for that
    would be to act on the original (see `belonging`).
    """
    snapshot = read(own_directory(job))
    belonging.require_own(snapshot)
    return snapshot


def own_directory(job: str | None) -> Path:
    """The same as `directory`. Raises DlctlError instead of going on to the run of another place if
    what lies in ./runs is a copy: in a copied project, that is what its user means.
    """
    found = directory(job)
    if job and (job == found.name or _is_path(job)):
        return found
    if not knownruns.is_here(found):
        for run in knownruns.all_of(filter(knownruns.is_here, knownruns.directories())):
            if not job or job == run.run.get("name"):
                belonging.require_own(run)
    return found


def _seen(snapshot: Snapshot) -> Snapshot:
    seen = belonging.seen(snapshot)
    belonging.warn_of_copy(seen)
    return seen


def read(directory: Path, *, every_page: bool = True) -> Snapshot:
    """A run. If its database cannot be read, or is damaged, the error says what is still there, and
    what next. `every_page`: see `load`.
    """
    try:
        return load(directory, every_page=every_page)
    except Unreadable as error:
        from dlctl.cli import unreadable

        raise unreadable.explained(directory, error) from error


def directory(job: str | None) -> Path:
    """The same as a directory, whose database may be damaged. In a project that has no run of its
    own it is said where it lies.
    """
    found = silently(job)
    if not job and Path("runs").is_dir() and not knownruns.is_here(found):
        where = console.escape(str(found.parent))
        console.note(f"no run of its own is in ./runs: {console.escape(found.name)} is in {where}")
    return found


def silently(job: str | None) -> Path:
    """The same without a word, for the completion of a command line."""
    if job:
        return _named(job)
    found = knownruns.nearest()
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
    found = knownruns.directories()
    same = _of_id(job, found) or _of_job_file(path, found) or _of_name(job, found)
    if not same:
        raise _unknown(job, found)
    return same[-1]


def _is_run(path: Path) -> bool:
    return path.is_dir() and paths.is_run(path)


def _is_path(job: str) -> bool:
    """Whether it is by its place that a run, or its job file, is named."""
    return Path(job).is_file() or _is_run(Path(job))


def _of_id(job: str, found: list[Path]) -> list[Path]:
    """Raises UsageError if there are several, and not just one of them is a run to work with."""
    same = [directory for directory in found if directory.name == job]
    if len(same) < 2:
        return same
    there = knownruns.all_of(same)
    own = [run for run in knownruns.without_copies(there) if run.state != knownruns.UNREADABLE]
    if len(own) != 1:
        raise _ambiguous(f'several runs are called "{job}"', there)
    return [own[0].directory]


def _of_job_file(path: Path, found: list[Path]) -> list[Path]:
    """The one that lives, else all. Raises UsageError if several do."""
    if not path.is_file():
        return []
    same = [run for run in knownruns.all_of(found) if _is_of(run, knownruns.job_file(path))]
    if not same:
        raise NotFound(f'no run was started from "{path}"', hint=f"dlctl start {path}")
    own = knownruns.without_copies(same) or same
    live = [run for run in own if run.is_live]
    if len(live) > 1:
        raise _ambiguous(f'several runs of "{path}" are at work', live)
    return [run.directory for run in live or own]


def _is_of(run: Snapshot, job_file: str) -> bool:
    """If its database cannot be read: as far as that can be seen."""
    if run.state != knownruns.UNREADABLE:
        return run.run.get("job_file") == job_file
    from dlctl.cli import unreadable

    file = unreadable.job_file(run.directory)
    return file is not None and knownruns.job_file(file) == job_file


def _of_name(job: str, found: list[Path]) -> list[Path]:
    """The one that lives, else those of one job file. Raises UsageError if there are several."""
    named = [run for run in knownruns.all_of(found) if run.run.get("name") == job]
    own = knownruns.without_copies(named) or named
    same = [run for run in own if knownruns.is_here(run.directory)] or own
    newest = {_owner(run, same): run for run in same}
    live = [run for run in same if run.is_live]
    if len(live) > 1 or (not live and len(newest) > 1):
        raise _ambiguous(f'several jobs are called "{job}"', live or [*newest.values()])
    return [run.directory for run in live or same]


def _owner(run: Snapshot, others: Sequence[Snapshot]) -> str:
    """The job file that a run is of. If that is gone, as after a move, or not known, as with a
    damaged database: that of the newest run beside it, or the directory that it lies in.
    """
    place = run.directory.parent
    beside = [other for other in others if other.directory.parent == place]
    files = [str(one.run.get("job_file")) for one in (*beside, run)]
    return next((file for file in reversed(files) if os.path.exists(file)), str(place))


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
