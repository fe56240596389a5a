"""How a daemon is started: its command line, environment and log file. The same for every launcher.

This is the only place that knows the name of the package the daemons are in.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from dlctl import runs


def argv(role: str, directory: Path, name: str, incarnation: int, control: str) -> list[str]:
    """Run incarnation `incarnation` of daemon `name`; `control` is the coordinator's address.

    -P: what lies in the present directory must not take the place of a module that we need.
    """
    module = ["-P", "-m", f"daemons.{role}"]
    return [sys.executable, *module, str(directory), name, str(incarnation), control]


def parse_argv(argv: list[str], directory: Path) -> tuple[str, str, int] | None:
    """(role, name, incarnation) if `argv` starts a daemon of this run; the inverse of `argv`."""
    match argv:
        case [_, "-P", "-m", module, run, name, incarnation, _]:
            package, _, role = module.partition(".")
            if package == "daemons" and incarnation.isdecimal() and _is_same(run, directory):
                return role, name, int(incarnation)
    return None


def _is_same(run: str, directory: Path) -> bool:
    """Whether both are one directory: behind a symbolic link it has another spelling."""
    if run == str(directory):
        return True
    with suppress(OSError):
        return os.path.samefile(run, directory)
    return False


def environment(role: str, directory: Path, name: str, incarnation: int) -> dict[str, str]:
    """What user code may rely on, besides what was there already."""
    mine = {
        "DLCTL_JOB": directory.name,
        "DLCTL_NAME": name,
        "DLCTL_ROLE": role,
        "DLCTL_RUN_DIR": str(directory),
        "DLCTL_INCARNATION": str(incarnation),
        "RANK": name.rpartition("-")[2],
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **mine}


def open_log(directory: Path, name: str, incarnation: int) -> int:
    """A file descriptor for a daemon's stdout and stderr, appending: its log file.

    Whatever the process prints, a crash of the interpreter included, ends up there; its own
    log lines are JSON, and nobody else writes the file.
    """
    path = runs.log_path(directory, name, incarnation)
    path.parent.mkdir(exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
