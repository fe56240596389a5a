"""Runs that lie beside a job file, and were made for one at another place.

A run belongs to its job file by that one's path. When a project's directory is moved, its runs come
with it: the newest of them is taken over if there is no doubt. Otherwise that it is there is said,
for a new run begins then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.cli import belonging, knownruns, snapshot, unreadable, values
from dlctl.cli.snapshot import Snapshot, started
from dlctl.errors import DlctlError
from dlctl.runs import database, paths
from dlctl.util import processes

if TYPE_CHECKING:
    from dlctl.config import JobFile

JOB_MODE = 0o644


def newest(file: Path, job: JobFile) -> Snapshot | None:
    """The newest run in the run directory of this job that is of its name and of a job file which
    is not there any more, or that is a copy; None if there is none.

    Another job file may well have runs of the same name here: these are its own.
    """
    parent = Path(os.path.abspath(file.parent / job.job.run_dir))
    found = [d for d in parent.glob(f"{job.job.name}-*") if paths.is_run(d)]
    strange = [
        run
        for run in knownruns.all_of(d.resolve() for d in found)
        if run.run.get("name") == job.job.name and _is_strange(run, file)
    ]
    return max(strange, key=lambda run: (started(run.directory), run.run_id), default=None)


def _is_strange(run: Snapshot, file: Path) -> bool:
    old = run.run.get("job_file")
    if not isinstance(old, str) or not old or old == knownruns.job_file(file):
        return False
    return not os.path.exists(old) or bool(_why_a_copy(run))


def _unseen(old: Path) -> str:
    """Why nobody can tell whether a job file is where it was; "" if that can be told."""
    try:
        old.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"whether {old} is still there cannot be seen ({error.strerror})"
    return ""


def obstacle(run: Snapshot, file: Path) -> str:
    """Why a run that `newest` has found cannot be taken over; "" if it can."""
    old = Path(str(run.run.get("job_file")))
    if doubt := _doubt(run):
        return doubt
    if unseen := _unseen(old):
        return unseen
    if old.name != file.name:
        return f"to go on with it, call the job file {old.name} again"
    return ""


def _doubt(run: Snapshot) -> str:
    """Why this may be a copy, or a run that lives; "" if it is neither."""
    if why := _why_a_copy(run):
        return why
    if run.is_live or processes.living(run.daemons):
        return f"processes of it live: dlctl stop -j {run.directory}"
    return ""


def _why_a_copy(run: Snapshot) -> str:
    try:
        belonging.require_own(run)
        belonging.refuse_unknown_coordinator(run)
    except DlctlError as error:
        return error.message
    return ""


def job_file_now(run: Snapshot) -> Path | None:
    """The job file of a run that was moved with its project, at its new place; None if it was not,
    or if there is any doubt. It is as far from the run as it was.
    """
    old, place = Path(str(run.run.get("job_file"))), run.run.get("place")
    if not isinstance(place, Mapping) or os.path.lexists(old):
        return None
    before, here = Path(str(place.get("path"))), run.directory.resolve()
    if old.parent not in before.parents:
        return None
    inner = before.relative_to(old.parent).parts
    if here.parts[-len(inner) :] != inner:
        return None
    file = here.parents[len(inner) - 1] / old.name
    return file if file.is_file() and not obstacle(run, file) else None


def beside(run: Snapshot) -> Path | None:
    """The job file that `dlctl start` would take this run over for, in the directory of its runs'
    directory; None if there is none.
    """
    if (now := job_file_now(run)) is not None:
        return now
    file = run.directory.resolve().parents[1] / Path(str(run.run.get("job_file"))).name
    is_its = file.is_file() and unreadable.job_section(file).get("name") == run.run.get("name")
    return file if is_its and not obstacle(run, file) else None


def of_another_place(run: Snapshot, file: Path) -> bool:
    """Whether this run of a job file is to be taken over."""
    return run.run.get("job_file") != knownruns.job_file(file)


def read_job(run: Snapshot, file: Path) -> dict[str, Any]:
    """The run's resolved job, with its task beside this job file if it lay beside its own."""
    content = snapshot.read_job(run.directory)
    old, job = Path(str(run.run.get("job_file"))).parent, content.get("job")
    task = job.get("task") if isinstance(job, dict) else None
    if not isinstance(task, str) or not task.startswith(f"{old}/"):
        return content
    moved = str(file.parent.resolve() / task.removeprefix(f"{old}/"))
    return {**content, "job": {**content["job"], "task": moved}}


def made_for(run: Snapshot) -> str:
    """Which job file a run that is taken over was of, as the rest of a sentence."""
    return f"was made for {run.run.get('job_file')}, which is not there any more"


def not_used(file: Path, job: JobFile) -> str:
    """What to say before a new run begins although one lies here; "" if none does."""
    run = newest(file, job)
    if run is None:
        return _unreadable(file, job)
    if not (why := obstacle(run, file)):
        return ""
    where, old = values.path(run.directory), run.run.get("job_file")
    return f"a run of this name lies in {where}, made for {old}; it is not used: {why}"


def _unreadable(file: Path, job: JobFile) -> str:
    """The same of runs whose database cannot be read; what is surely of this job is refused."""
    parent = Path(os.path.abspath(file.parent / job.job.run_dir))
    found = sorted(parent.glob(f"{job.job.name}-????"))
    for run in knownruns.all_of(directory.resolve() for directory in found):
        if run.state == knownruns.UNREADABLE:
            where = values.path(run.directory)
            return f"a run of this name lies in {where}; it is not used: {run.reason}"
    return ""


def take_over(run: Snapshot, file: Path) -> None:
    """From now on the run belongs to this job file. Raises OSError or sqlite3.Error.

    Where it was when it was started stays on record: what its servers have kept may be older.
    """
    content = json.dumps(read_job(run, file), indent=1).encode()
    paths.write(run.directory / "job.json", content, JOB_MODE)
    with closing(database.RunDb(run.directory)) as db:
        db.put_run(job_file=knownruns.job_file(file))
        db.commit()
    paths.register(run.directory)
