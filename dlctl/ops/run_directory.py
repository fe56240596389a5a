"""A run directory before its coordinator has said anything: what is written, and its start."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.errors import DlctlError
from dlctl.ops import kept, other_hosts
from dlctl.runs import lock, task_code
from dlctl.runs.snapshot import Snapshot

if TYPE_CHECKING:
    import subprocess

    from dlctl.config import JobFile

JOB_MODE = 0o644


class Launched(NamedTuple):
    directory: Path
    process: subprocess.Popen[bytes] | None
    """The coordinator; None if nothing had to be started."""
    goes_on: bool = False
    """The run goes on where it was; otherwise it begins, or resumes from a checkpoint."""


def give_up_shards(previous: Snapshot) -> None:
    """Remove what came after the checkpoint that a run goes back to, on all of its hosts.

    Its old job says where that is. No coordinator must be there: its agents would be ended, too.
    """
    kept.remove(previous)
    other_hosts.end(previous, 0.0, purge=True)


def resume_keys(previous: Snapshot, resume: str) -> dict[str, Any]:
    """The same for a run that goes on from the checkpoint `resume`, with its job as it was."""
    from dlctl.ops import remains

    job_file = str(previous.run.get("job_file") or "")
    job = remains.read_jobfile(previous.directory)
    return first_row(previous.directory, job_file, job, resume)


def first_row(directory: Path, job_file: str, job: JobFile, resume: str) -> dict[str, Any]:
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
        "resume": resume,
        **dict.fromkeys(("pid", "pid_start", "control", "control_key")),
        **dict.fromkeys(("started_at", "ready_at", "ended_at", "updated_at")),
    }


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """What the operating system or the database refuses becomes an error that says where."""
    try:
        yield
    except OSError as error:
        where, reason = str(error.filename or directory), error.strerror or str(error)
        raise DlctlError(
            f"cannot write the run: {reason}", where=where, hint=f"df -h {directory.parent}"
        ) from error
    except sqlite3.Error as error:
        raise DlctlError(
            f"cannot write the run's database: {error}",
            where=str(directory),
            hint=f"df -h {directory.parent}",
        ) from error


def start_coordinator(directory: Path) -> subprocess.Popen[bytes]:
    """Start the coordinator of a prepared run directory. Unless daemons of the run live, the task's
    files are what they are now. Raises DlctlError or OSError.
    """
    from dlctl.launch import local

    if (directory / task_code.CODE).exists() and not any(local.living(directory)):
        task_code.forget(directory)
    return local.start_coordinator(directory)
