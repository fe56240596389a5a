"""A run directory before its coordinator has said anything: what is written, and its start."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.errors import DlctlError
from dlctl.ops import kept, other_hosts
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
    goes_on: bool = False
    """The run goes on where it was; otherwise it begins, or resumes from a checkpoint."""


def job_files(file: Path, content: Json) -> dict[str, bytes]:
    """What a run directory says of its job."""
    return {"job.toml": file.read_bytes(), "job.json": json.dumps(content, indent=1).encode()}


def write(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        paths.write(directory / name, data, JOB_MODE)


def first_row(directory: Path, job_file: str, job: JobFile, resume: Path | None) -> Json:
    """What the database says before the coordinator has written anything."""
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
    """The next coordinator of a run that goes on where it was; `row` is put before. On failure the
    run is as it was.
    """
    with explained(previous.directory):
        _put(previous.directory, row)
        try:
            return start_coordinator(previous.directory, goes_on=True)
        except BaseException:
            _put(previous.directory, {key: previous.run.get(key) for key in row})
            raise


def resume(
    previous: Snapshot, row: Json, checkpoint: Path, cost: str, files: Mapping[str, bytes]
) -> Launched:
    """The same from a checkpoint, after which all that came later is removed, on other hosts, too.
    `cost` goes into the run's events. On failure its files are as they were; if not even its
    database could be written, its shards are still there.
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
            # The old job says where that is. No coordinator must be there: its agents are ended.
            kept.remove(previous)
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
    """What the operating system or the database refuses becomes an error that says where."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        where, what, reason = str(directory), "the run's database", str(error)
        if isinstance(error, OSError):
            where, what = str(error.filename or directory), "the run"
            reason = error.strerror or str(error)
        raise DlctlError(
            f"cannot write {what}: {reason}", where=where, hint=f"df -h {directory.parent}"
        ) from error


def start_coordinator(directory: Path, *, goes_on: bool = False) -> Launched:
    """Start the coordinator of a prepared run directory. Unless daemons of the run live, the task's
    files are what they are now. Raises DlctlError or OSError.
    """
    from dlctl.launch import local

    paths.socket_address(directory.name, "coordinator")
    paths.register(directory)
    if (directory / task_code.CODE).exists() and not any(local.living(directory)):
        task_code.forget(directory)
    return Launched(directory, local.start_coordinator(directory), goes_on)
