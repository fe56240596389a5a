"""The files of a job with parties on other hosts: a host gets those of its own parties alone.

A party's files are the Python files in the folder of its task, and below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from dlctl.job import placement
from dlctl.job.config import HOME, of_stored

F = TypeVar("F")
Job = dict[str, Any]


def with_tasks(job: Job, path: Callable[[str], str]) -> Job:
    """A stored job in which the file of each party's task is path(file)."""
    moved = [{**party, "task": _moved(party["task"], path)} for party in job.get("parties", ())]
    return {**job, "parties": moved} if moved else job


def relative(job: Job, home: Path) -> Job:
    """The same with paths that are relative to the directory of the job file."""
    root = home.resolve()
    return with_tasks(job, lambda file: str(Path(file).relative_to(root)))


def of_host(files: Mapping[str, F], job: Job, agent: str) -> dict[str, F]:
    """Those of the files, by relative path, that an agent's parties need; all without parties."""
    if not job.get("parties"):
        return dict(files)
    host = placement.agents(of_stored(job).places)[agent].name or HOME
    folders = [
        PurePosixPath(party["task"].rpartition(":")[0]).parent
        for party in job["parties"]
        if party["host"] == host
    ]
    return {
        path: file
        for path, file in files.items()
        if any(PurePosixPath(path).is_relative_to(folder) for folder in folders)
    }


def _moved(task: str, path: Callable[[str], str]) -> str:
    file, _, name = task.rpartition(":")
    return f"{path(file)}:{name}"
