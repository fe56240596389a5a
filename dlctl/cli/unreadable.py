"""Runs whose database cannot be read: what is known of them without it, and what can still be had.

Their checkpoints are files of their own, and so is the job as it was. Of which job file such a run
is, only its database says for certain; here it is taken for one of this job in doubt, for a new run
that begins unnoticed costs all that the old one did.
"""

from __future__ import annotations

import re
import shlex
import sqlite3
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dlctl.cli import knownruns, values
from dlctl.cli.snapshot import Snapshot, Unreadable, load, newest_whole, read_job, started
from dlctl.errors import DlctlError
from dlctl.runs import checkpoints, database, paths, preferred
from dlctl.util import hints
from dlctl.util.units import short_size

if TYPE_CHECKING:
    from dlctl.config import JobFile
    from dlctl.launch import local

_RUN_ID_END = re.compile(r"-[0-9a-f]{4}")


# ---------------------------------------------------------------- what to do


def explained(directory: Path, error: DlctlError, *, read_all: bool = False) -> Unreadable:
    """The same error with what is still there, and the next commands.

    `read_all`: every byte of the checkpoints is read; otherwise `export` does that itself.
    """
    from dlctl.cli import belonging

    named, where = _named(directory), error.where or str(directory / database.FILE)
    told, next_steps = [error.message, *_last_step(directory)], [error.hint]
    if (original := belonging.original_of(directory)) is not None:
        told.append(f"this directory is a copy, and the run is in {original}")
        return Unreadable("\n  ".join(told), where=where, hint=belonging.where_to_look(original))
    if there := [found.name for found in living(directory)]:
        told.append(f"daemons of it live: {', '.join(there)}")
        next_steps.append(_ending(directory, named))
    file = job_file(directory)
    typed = shlex.quote(values.path(file)) if file else ""
    saved, ways_on = _saved(directory, named, typed, read_all=read_all)
    told.append(saved)
    next_steps += ways_on
    if file:
        next_steps.append(anew(typed))
    if held := _bytes_held(directory):
        told.append(f"its servers' shards are still kept, {short_size(held)}")
        if not there:
            next_steps.append(hints.told(f"dlctl stop --kill -j {named}", "gives the shards up"))
    hint = hints.either(*next_steps) or f"ls -l {directory}"
    return Unreadable("\n  ".join(told), where=where, hint=hint)


def _ending(directory: Path, named: str) -> str:
    """How to end the daemons of a run; one that is led, as far as it can be read, saves itself."""
    from dlctl.cli import recovery

    with suppress(DlctlError):
        if recovery.is_led(load(directory)):
            return hints.told(f"dlctl stop -j {named}", "ends the run with a checkpoint")
    return hints.told(f"dlctl stop --kill -j {named}", "ends them")


def anew(job_file: str) -> str:
    """`job_file` as one types it."""
    return hints.told(f"dlctl start --fresh {job_file}", "begins anew, at step 0")


def _last_step(directory: Path) -> list[str]:
    """How far the run had come, as far as its database still says."""
    try:
        with closing(database.RunDb(directory, readonly=True)) as db:
            step = db.run().get("step")
    except (sqlite3.Error, ValueError, DlctlError):
        return []
    return [f"it had come to step {values.count(step)} at least"] if type(step) is int else []


def _saved(directory: Path, named: str, job_file: str, *, read_all: bool) -> tuple[str, list[str]]:
    """(what is there of checkpoints, what can be done with them)."""
    good = (
        checkpoints.newest_good(directory, ordered=preferred.order(directory))
        if read_all
        else newest_whole(directory)
    )
    if good is not None:
        step, path = values.count(good[1]["step"]), values.path(good[0])
        what = "newest good checkpoint is whole" if read_all else "newest checkpoint is still there"
        which = shlex.quote(path) if read_all else f"-j {named}"
        export = hints.told(f"dlctl checkpoint export {which}", f"the model as of step {step}")
        start = f"dlctl start --from {shlex.quote(path)} {job_file}"
        on = [hints.told(start, f"a new run goes on from step {step}")] if job_file else []
        return f"its {what}: step {step}, {path}", [*on, export]
    if count := len(checkpoints.finished(directory)):
        verify = f"dlctl checkpoint verify -j {named}"
        return f"and of its {count} checkpoints none is whole", [verify]
    return "and it has no checkpoint", []


def _bytes_held(directory: Path) -> int:
    from dlctl.cli import kept

    unknown = knownruns.UNREADABLE
    return kept.bytes_held(Snapshot(directory, {}, [], unknown, "", False, time.time()))


def living(directory: Path) -> list[local.Living]:
    """Its daemons on this machine, known by their command lines."""
    from dlctl.launch import local

    return list(local.living(directory))


def _named(directory: Path) -> str:
    """How to name a run: its id, if no other run has the same and commands find it by that."""
    same = [known for known in knownruns.directories() if known.name == directory.name]
    path = directory.name if same == [directory.resolve()] else values.path(directory)
    return shlex.quote(path)


def damaged(words: Iterable[str], error: Exception) -> DlctlError | None:
    """What to say if a command has come upon a damaged page of a database: of which run, and what
    next; None if no run is damaged. `words`: of its command line, which may name the run.
    """
    if not isinstance(error, sqlite3.DatabaseError):
        return None
    from dlctl.cli import belonging

    named = set(words)
    known = knownruns.directories()[::-1]
    for directory in sorted(known, key=lambda directory: directory.name not in named):
        try:
            belonging.check_database(directory, read_all=False)
        except DlctlError as found:
            return found
    return None


# ---------------------------------------------------------------- of which job


def refuse(file: Path, job: JobFile, previous: Snapshot | None, *, fresh: bool) -> None:
    """Raises DlctlError if a run of this job that is newer than `previous` cannot be read: to begin
    anew, or to go on with an older one, is for its owner to say (`fresh`). As long as daemons of it
    live not even he can.
    """
    parent = (file.parent / job.job.run_dir).resolve()
    for directory, error in _newer(file, job.job.name, parent, previous):
        if not fresh or living(directory):
            told = f"{directory.name} is of this job, and cannot be gone on with: {error.message}"
            raise explained(
                directory, Unreadable(told, where=error.where, hint=error.hint), read_all=True
            )


def newer(run: Snapshot) -> str:
    """The newest run of the same job that is newer than this one and cannot be read, as one names
    it; "" if there is none.
    """
    file, name = run.run.get("job_file"), run.run.get("name")
    if not isinstance(file, str) or not isinstance(name, str):
        return ""
    found = _newer(Path(file), name, run.directory.parent, run)
    return next((_named(directory) for directory, _ in found), "")


def _newer(
    file: Path, name: str, parent: Path, previous: Snapshot | None
) -> Iterator[tuple[Path, DlctlError]]:
    """(directory, why it cannot be read) of such runs, the newest first."""
    since = (0.0, "") if previous is None else _age(previous.directory)
    here = {path.resolve() for path in parent.glob(f"{name}-????") if paths.is_run(path)}
    found = {path for path in here | {*knownruns.directories()} if _has_name(path, name)}
    for directory in sorted(found, key=_age, reverse=True):
        if _age(directory) <= since or not _may_belong(directory, file):
            continue
        try:
            load(directory)
        except Unreadable as error:
            yield directory, error


def _age(directory: Path) -> tuple[float, str]:
    """What comes later in order was started later."""
    return started(directory) or directory.stat().st_mtime, directory.name


def _has_name(directory: Path, name: str) -> bool:
    """Whether the run is called after this job, and its own record says nothing else."""
    if not directory.name.startswith(f"{name}-"):
        return False
    section = read_job(directory).get("job")
    of = section.get("name") if isinstance(section, dict) else name
    return of == name and bool(_RUN_ID_END.fullmatch(directory.name.removeprefix(name)))


def _may_belong(directory: Path, file: Path) -> bool:
    """Whether the run is not of a job file at another place, which is there."""
    home = _home(directory)
    return home is None or home == file.parent.resolve() or not home.is_dir()


def _home(directory: Path) -> Path | None:
    """Where the run's job file was: its task is known from there; None if nobody knows."""
    section = read_job(directory).get("job")
    task = section.get("task") if isinstance(section, dict) else None
    if not isinstance(task, str):
        return None
    inner = job_section(directory / "job.toml").get("task")
    if isinstance(inner, str) and task.endswith(f"/{inner}"):
        return Path(task.removesuffix(f"/{inner}"))
    return Path(task).parent


def job_file(directory: Path) -> Path | None:
    """The job file that the run was started from, as far as that can be seen: the one that is as
    its copy in the run directory, else one of this name; None if there is none.
    """
    homes = [home for home in (_home(directory), directory.parents[1]) if home is not None]
    files = [file for home in homes for file in sorted(home.glob("*.toml")) if file.is_file()]
    copy = _bytes(directory / "job.toml")
    same = [file for file in files if copy and _bytes(file) == copy]
    same += [file for file in files if _has_name(directory, str(job_section(file).get("name")))]
    return same[0] if same else None


def job_section(file: Path) -> dict[str, object]:
    """[job] of a job file, as it stands there; {} if it cannot be read."""
    try:
        found = tomllib.loads(_bytes(file).decode()).get("job")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
