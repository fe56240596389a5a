"""How a daemon is started: its command line, environment and log file. The same for every launcher.

This is the only place that knows the name of the package the daemons are in.

A `Launcher` places agents on one kind of host; agents start everything else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dlctl.errors import DlctlError
from dlctl.runs import paths

HOST_FILE = "host.json"
"""Only in a directory that stands for a run directory on another machine than the coordinator's."""


class Credentials(NamedTuple):
    """What a daemon is handed when it is started: its own secret key, and whom to trust."""

    secret: str
    """"": the connections of this run have no keys."""
    coordinator: str
    """The coordinator's public key."""

    def to_bytes(self) -> bytes:
        return json.dumps(self._asdict()).encode()


NO_CREDENTIALS = Credentials("", "")


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
    if role == "worker":
        with suppress(OSError, ValueError):  # It says itself that it has no job.
            mine |= same_hashes(read_job(directory)["job"]["seed"])
    return {**os.environ, **mine}


def same_hashes(seed: int) -> dict[str, str]:
    """Sets of strings have the same order in all processes that run a job's task: word numbers and
    classes that come of one would differ between workers, and after a resume.
    """
    return {"PYTHONHASHSEED": str(seed)}


def open_log(directory: Path, name: str, incarnation: int) -> int:
    """A file descriptor for a daemon's stdout and stderr, appending: its log file.

    Whatever the process prints, a crash of the interpreter included, ends up there; its own
    log lines are JSON, and nobody else writes the file.
    """
    path = paths.log_path(directory, name, incarnation)
    path.parent.mkdir(exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def read_job(directory: Path) -> dict[str, Any]:
    """The resolved job of a run, as `config.from_dict` takes it. Raises OSError and ValueError."""
    job: dict[str, Any] = json.loads((directory / "job.json").read_text())
    return job


# ---------------------------------------------------------------- agents


class Order(NamedTuple):
    """An agent that is to be started."""

    name: str
    incarnation: int
    control: str
    """The coordinator's address."""
    credentials: Credentials


class Ended(NamedTuple):
    """An agent is gone, or could not be started."""

    name: str
    incarnation: int
    status: int | None
    """Exit code or minus a signal; None: nobody saw it, and trying again may help. Of a host where
    it could not be started, the exit code of the error; 5 (`Unreachable`) may be over soon."""
    error: DlctlError | None = None
    """Why it could not be started, or be reached to be killed; None: its log has its last words."""
    words: tuple[str, ...] = ()
    """What others said about that error, line by line."""


class Waiting(NamedTuple):
    """An agent cannot be started yet, and nobody is to blame: there is no host for it so far. Said
    again and again, while that is so."""

    name: str
    incarnation: int
    why: str
    """As in "job 17 is pending: Resources"."""


class Notice(NamedTuple):
    """What whoever owns the hosts does to all of the run."""

    kind: str
    """"saving": the hosts may be taken away soon: a checkpoint is saved. "ending": the time is
    nearly over: the run is saved and stopped. "over": there are no hosts any more, for good."""
    reason: str


class Watcher(Protocol):
    """What a launcher needs of the loop that it works in."""

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Call `ready` whenever `fd` can be read."""
        ...

    def unwatch(self, fd: int) -> None: ...


class Launcher(Protocol):
    """Places agents, and says which are gone. No method waits for anything.

    One is made per coordinator, as `L(run_directory, hosts, watcher, tell)`: `hosts` are those of
    `placement.agents` that it is to reach. `tell` takes `Ended`: at most once for each order, and
    also for an agent that `adopt` has found; and, from launchers whose hosts belong to somebody
    else (a batch system), `Waiting` and `Notice`.
    """

    def start(self, order: Order) -> None:
        """Place an agent. One of the same name that is still there is killed first."""
        ...

    def kill(self, name: str) -> None:
        """SIGKILL for this agent, and for it alone: its daemons live on."""
        ...

    def adopt(self, recorded: dict[str, int]) -> dict[str, int]:
        """The agents of this launcher that are there already, with their incarnations.

        `recorded`: the incarnation of every agent that the coordinator before this one has
        placed. Agents of which nothing can be known without waiting are not in the answer.
        """
        ...

    def look(self) -> None:
        """A chore, about once a second: what has taken too long is given up."""
        ...

    def close(self) -> None:
        """The run has ended, and all agents with it: give back what was taken for it. The only
        method that may wait, for seconds; nobody is heard any more."""
        ...
