"""The fields of a request, with strict types, and the location of an agent's files.

    <dir>/<agent>/<run id>/     the "host directory": counterpart of the run directory on this host
        host.json   marks it as one             job.json   the resolved job
        logs/       of the daemons here         task/      the Python files of the job

It has the name of the run, because daemons identify their run by the name of their directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from dlctl.errors import DlctlError, UsageError
from dlctl.runs import paths

T = TypeVar("T")
Request = Mapping[str, Any]
FOLDER = "hosts"
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}", re.IGNORECASE)
_AGENT = re.compile(r"agent-[0-9]{1,5}")


def field(request: Request, name: str, kind: type[T]) -> T:
    """A field of a request. Raises UsageError if it is missing, or of another type (`True` is not a
    number).
    """
    value = request.get(name)
    if type(value) is not kind:
        raise UsageError(f'the field "{name}" of the request has to be of type {kind.__name__}')
    return value


def natural(request: Request, name: str) -> int:
    value = field(request, name, int)
    if value < 0:
        raise UsageError(f'the field "{name}" of the request must not be below zero')
    return value


def name_of_agent(request: Request) -> str:
    return _matching(request, "agent", _AGENT)


def host_directory(request: Request) -> Path:
    """Where the files of this agent are, or would be. Creates and checks nothing."""
    agent, run_id = name_of_agent(request), _matching(request, "run_id", _RUN_ID)
    return root(request) / agent / run_id


def root(request: Request) -> Path:
    """Where the files of all agents of this host are, or would be. Raises UsageError."""
    if not field(request, "dir", str):
        return paths.index_dir().parent / FOLDER
    path = full_path(request, "dir")
    if ".." in path.parts:
        raise UsageError("dir of a host has to be a path without ..", where=str(path))
    return path


def full_path(request: Request, name: str) -> Path:
    """A field that is an absolute path. Raises UsageError if it is none."""
    given = field(request, name, str)
    path = Path(given).expanduser()
    if not path.is_absolute() or "\0" in given:
        raise UsageError(f"{name} has to be an absolute path", where=given.replace("\0", "\\0"))
    return path


def _matching(request: Request, name: str, pattern: re.Pattern[str]) -> str:
    value = field(request, name, str)
    if not pattern.fullmatch(value):
        raise UsageError(f'the field "{name}" of the request is invalid: {value!r:.100}')
    return value


def make(directory: Path) -> None:
    """Create a host directory and its parents. Raises DlctlError if that fails, or if another user
    can enter it: its files are executed.
    """
    root = directory.parents[1]
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for path in (root, directory.parent, directory):
            path.mkdir(mode=0o700, exist_ok=True)
            check(path)
    except OSError as error:
        raise DlctlError(
            f"cannot create the directory of this run: {error.strerror}",
            where=str(error.filename or directory),
            hint="set dir of this host in [[hosts]] to a place where you can write",
        ) from error


def check(path: Path) -> None:
    """Raises DlctlError unless this user owns the directory and no other user can enter it."""
    if not paths.is_private(path):
        raise DlctlError(
            "this must be a directory of yours with mode 0700",
            where=str(path),
            hint=f"there: chmod 700 {path}, or set dir of this host in [[hosts]]",
        )


def is_there(directory: Path) -> bool:
    """Whether this directory exists. Raises DlctlError if other users can enter it."""
    if not directory.is_dir():
        return False
    for path in (directory.parents[1], directory.parent, directory):
        check(path)
    return True
