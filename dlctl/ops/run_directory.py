"""A run directory before its coordinator writes to it: its initial files, and the start."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.errors import DlctlError
from dlctl.ops import other_hosts, stop
from dlctl.runs import lineage, lock, paths, task_code
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import Snapshot

if TYPE_CHECKING:
    import subprocess

    from dlctl.config import JobFile

JOB_MODE = 0o644
Json = dict[str, Any]


class Launched(NamedTuple):
    directory: Path
    process: subprocess.Popen[bytes] | None
    """The coordinator; None if nothing had to be started."""
    resumes: bool = False
    """The run resumes where it stopped; otherwise it is new, or resumes from a checkpoint."""


def job_files(file: Path, content: Json) -> dict[str, bytes]:
    """The files in a run directory that describe its job."""
    return {"job.toml": file.read_bytes(), "job.json": json.dumps(content, indent=1).encode()}


def write(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        paths.write(directory / name, data, JOB_MODE)


def first_row(directory: Path, job_file: str, job: JobFile, resume: Path | None) -> Json:
    """The database's content before the coordinator writes anything."""
    return {
        "run_id": directory.name,
        "name": job.job.name,
        "job_file": job_file,
        "place": lock.place(directory),
        "algorithm": job.algorithm.name,
        "state": "pending",
        "reason": "",
        "waiting": "",
        "resume": "" if resume is None else str(resume),
        **dict.fromkeys(("pid", "pid_start", "control", "control_key")),
        **dict.fromkeys(("started_at", "ready_at", "ended_at", "updated_at")),
    }


def relaunch(previous: Snapshot, row: Json) -> Launched:
    """Start the next coordinator of a run that resumes where it stopped; writes `row` first. On
    failure the run is unchanged.
    """
    with explained(previous.directory):
        _put(previous.directory, row)
        try:
            return start_coordinator(previous.directory, resumes=True)
        except BaseException:
            _put(previous.directory, {key: previous.run.get(key) for key in row})
            raise


def resume(
    previous: Snapshot, row: Json, checkpoint: Path, cost: str, files: Mapping[str, bytes]
) -> Launched:
    """Resume from a checkpoint; everything later than it is removed, on other hosts too. `cost`
    goes into the run's events. On failure its files are unchanged; if not even its database could
    be written, its shards still exist.
    """
    directory = previous.directory
    with explained(directory):
        before = {name: (directory / name).read_bytes() for name in files}
        with closing(RunDb(directory)) as db:
            db.put_run(**row)
            lineage.record(db, directory, checkpoint, cost)
            db.clear_memory()
            db.commit()
        try:
            # The old job gives the location. No coordinator may be alive: its agents are ended.
            stop.remove_kept(previous)
            other_hosts.end(previous, 0.0, purge=True)
            write(directory, files)
            return start_coordinator(directory)
        except BaseException:
            write(directory, before)
            _put(directory, {key: previous.run.get(key) for key in row})
            raise


def _put(directory: Path, row: Json) -> None:
    with closing(RunDb(directory)) as db:
        db.put_run(**row)
        db.commit()


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turns errors of the operating system or the database into a DlctlError with a location."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        text, where = f"cannot write the run's database: {error}", str(directory)
        if isinstance(error, OSError):
            text = f"cannot read or write a file: {error.strerror or error}"
            where = str(error.filename or directory)
        raise DlctlError(text, where=where, hint=f"df -h {directory.parent}") from error


def start_coordinator(directory: Path, *, resumes: bool = False) -> Launched:
    """Start the coordinator of a prepared run directory. Unless daemons of the run are alive, it
    uses the current files of the task. Raises DlctlError or OSError.
    """
    from dlctl.launch import local

    paths.socket_address(directory.name, "coordinator")
    paths.register(directory)
    if (directory / task_code.CODE).exists() and not any(local.living(directory)):
        task_code.forget(directory)
    return Launched(directory, local.start_coordinator(directory), resumes)
