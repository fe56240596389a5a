"""Which run a command is about, and which of its daemons."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlctl import runs, ways
from dlctl.cli import belonging
from dlctl.cli.snapshot import Snapshot, Unreadable, load, started
from dlctl.errors import DlctlError, NotFound, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

LISTED_MAX = 8


def pick(job: str | None) -> Snapshot:
    """The run that `-j/--job` or $DLCTL_JOB names; else the only one that runs, else the newest:
    of those in ./runs, and if there are none, of all.

    `job` is a run id, a job's name (its newest run, by the same rule), a run directory, or a job
    file. Raises NotFound with what there is, and UsageError if several runs could be meant.
    """
    snapshot = read(directory(job))
    belonging.warn_of_copy(snapshot)
    return snapshot


def look(job: str | None) -> Snapshot:
    """The same for a command that says how a run is: of a copy it does not know that."""
    return belonging.seen(pick(job))


def skim(job: str | None) -> Snapshot:
    """The same for a command that shows files: of the database it needs hardly anything, so damage
    that can be passed over does not keep it from them.
    """
    snapshot = _loaded(directory(job))
    belonging.warn_of_copy(snapshot)
    return belonging.seen(snapshot)


def own(job: str | None) -> Snapshot:
    """The same for a command that acts on the run. Raises DlctlError for a copy as well, for that
    would be to act on the original (see `belonging`).
    """
    snapshot = read(directory(job))
    belonging.require_own(snapshot)
    return snapshot


def read(directory: Path) -> Snapshot:
    """A run. If its database cannot be read, or is damaged, the error says what is still there, and
    what next. Of a run that lives nobody can tell whether it is: its coordinator has it in memory.
    """
    snapshot = _loaded(directory)
    if not snapshot.is_live:
        belonging.check_database(directory, read_all=False)
    return snapshot


def _loaded(directory: Path) -> Snapshot:
    try:
        return load(directory)
    except Unreadable as error:
        from dlctl.cli import unreadable

        raise unreadable.explained(directory, error) from error


def directory(job: str | None) -> Path:
    """The same as a directory, whose database may be damaged."""
    if job:
        return _named(job)
    found = _nearest(known())
    live = [snapshot for snapshot in _without_copies(readable(found)) if snapshot.is_live]
    if len(live) > 1:
        raise _ambiguous("several jobs run", live)
    if live:
        return live[0].directory
    if not found:
        raise NotFound(
            "there are no runs yet", hint=ways.either("dlctl run JOBFILE", "dlctl init DIR")
        )
    return found[-1]


def _nearest(directories: Sequence[Path]) -> list[Path]:
    """Those in ./runs; all, if none of them is: who works in a project means its runs, and must not
    end those of another one. A copy is nobody's own, see `belonging`.
    """
    here = [directory for directory in directories if directory.parent == Path("runs").resolve()]
    return [directory for directory in here if not _is_copy(directory)] or [*directories]


def _is_copy(directory: Path) -> bool:
    try:
        return belonging.seen(load(directory)).original is not None
    except Unreadable:
        return belonging.original_of(directory) is not None
    except DlctlError:
        return False


def known() -> list[Path]:
    """Directories of all runs in ./runs and in the user's index, the last started one last."""
    here = Path("runs")
    local = [d.resolve() for d in here.iterdir() if runs.is_run(d)] if here.is_dir() else []
    return sorted({*local, *runs.all_runs()}, key=lambda d: (started(d), d.name, d))


def readable(
    directories: Iterable[Path], read: Callable[[Path], Snapshot] = load
) -> list[Snapshot]:
    """Those that `read` can; one broken database must not hide all other runs."""
    found = []
    for directory in directories:
        try:
            found.append(read(directory))
        except DlctlError:
            continue
    return found


def _without_copies(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Those that nobody knows to be a copy of another one: the processes of a copy are the
    original's, and no command can do anything for it that it cannot do for the original.
    """
    return [snapshot for snapshot in snapshots if belonging.seen(snapshot).original is None]


def _named(job: str) -> Path:
    path = Path(job)
    if path.is_dir() and runs.is_run(path):
        return path.resolve()
    found = known()
    exact = [directory for directory in found if directory.name == job]
    if len(exact) > 1:
        own = _without_copies(readable(exact))
        if len(own) != 1:
            raise _ambiguous(f'several runs are called "{job}"', readable(exact))
        exact = [own[0].directory]
    of_job = exact or _of_job_file(path, found) or _of_name(job, found)
    if not of_job:
        raise _unknown(job, found)
    return of_job[-1]


def _of_job_file(path: Path, found: list[Path]) -> list[Path]:
    if not path.is_file():
        return []
    snapshots = readable(found)
    same = [s.directory for s in snapshots if s.run.get("job_file") == job_file(path)]
    if not same:
        raise NotFound(f'no run was started from "{path}"', hint=f"dlctl start {path}")
    return same


def job_file(path: Path) -> str:
    """How a job file is known: a link keeps its own name, because the task lies beside it."""
    return str(path.parent.resolve() / path.name)


def of_job(file: str, name: str) -> list[Snapshot]:
    """All runs of the job `name` in this file (see `job_file`), the last started one last.

    "dlctl start" takes that one up again.
    """
    wanted = {"job_file": file, "name": name}
    same = [s for s in readable(known()) if {key: s.run.get(key) for key in wanted} == wanted]
    return _without_copies(same)


def _of_name(job: str, found: list[Path]) -> list[Path]:
    """Raises UsageError if they are of several job files, and not just one of them lives."""
    from dlctl.cli import unreadable

    named = [run for run in unreadable.all_of(found) if run.run.get("name") == job]
    near = _nearest([run.directory for run in named])
    same = [run for run in _without_copies(named) if run.directory in near]
    live = [run for run in same if run.is_live]
    newest = {str(run.run.get("job_file")): run for run in same}
    if len(newest) > 1 and len(live) != 1:
        raise _ambiguous(f'several jobs are called "{job}"', [*newest.values()])
    return [run.directory for run in (live if len(newest) > 1 else same)]


def _unknown(job: str, found: list[Path]) -> NotFound:
    names = [directory.name for directory in reversed(found)]
    jobs = [name.rpartition("-")[0] for name in names]
    close = difflib.get_close_matches(job, [*names, *jobs], n=1)
    meant = f'; did you mean "{close[0]}"?' if close else f"; known: {_listed(names)}"
    where = "DLCTL_JOB" if os.environ.get("DLCTL_JOB") == job else None
    return NotFound(f'no run or job is called "{job}"{meant}', where=where, hint="dlctl ps")


def _ambiguous(what: str, snapshots: Sequence[Snapshot]) -> UsageError:
    same = len({s.run_id for s in snapshots}) < len(snapshots)
    names = [str(s.directory) if same else s.run_id for s in snapshots]
    hint = ways.told("dlctl ps", "shows them; -j and one of these names says which one is meant")
    return UsageError(f"{what}: {_listed(names)}", hint=hint)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else ""
    return (", ".join(names[:LISTED_MAX]) or "none") + more


def complete_daemons(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of daemons for TAB, from local files only."""
    from click.shell_completion import CompletionItem

    try:
        names = read(directory(ctx.params.get("job"))).roles()
    except DlctlError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def match_daemons(
    patterns: Sequence[str], known: Mapping[str, str], roles: Collection[str] = ()
) -> list[str]:
    """Names of `known` (name -> role) that match one of the patterns (all if there are none).

    A pattern is a name or a glob such as "worker-*"; `roles` narrows the choice. Raises NotFound,
    with a suggestion, for a pattern that matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            close = difflib.get_close_matches(pattern, known, n=1)
            meant = f'; did you mean "{close[0]}"?' if close else f"; known: {_listed(list(known))}"
            raise NotFound(f'no daemon is called "{pattern}"{meant}', hint="dlctl status")
    chosen = [n for n in known if not patterns or any(fnmatchcase(n, p) for p in patterns)]
    chosen = [name for name in chosen if not roles or known[name] in roles]
    if not chosen:
        raise NotFound(f"no such daemon has the role {' or '.join(sorted(roles))}")
    return chosen
