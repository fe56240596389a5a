"""How a daemon is started: its command line, environment and log file, for all launchers.

This is the only module that knows the name of the daemons' package.

Launchers start agents (`launcher.py`); agents start everything else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dlctl.errors import DlctlError
from dlctl.job.config import current
from dlctl.runs import paths
from dlctl.util import regular

HOST_FILE = "host.json"
"""Marks a directory that stands for a run directory on a host without the coordinator."""


class Credentials(NamedTuple):
    """What a daemon receives at its start: its own secret key, and the key to trust."""

    secret: str
    """"": the connections of this run are not encrypted."""
    coordinator: str
    """The coordinator's public key."""

    def to_bytes(self) -> bytes:
        return json.dumps(self._asdict()).encode()


NO_CREDENTIALS = Credentials("", "")


SERVER, WORKER, SCRIPT = "server", "worker", "script"
"""Packages of daemons; the last: what a worker with a training loop of its own is started with."""


def argv(
    role: str, directory: Path, name: str, incarnation: int, control: str, *, has_loop: bool = False
) -> list[str]:
    """The command of incarnation `incarnation` of daemon `name`; `control` is the coordinator's
    address. has_loop: `JobFile.has_loop`.

    -P: files in the current directory must not shadow modules that the daemon imports.
    """
    package = SCRIPT if has_loop and role == WORKER else role
    module = ["-P", "-m", f"daemons.{package}"]
    return [sys.executable, *module, str(directory), name, str(incarnation), control]


def parse_argv(argv: list[str], directory: Path) -> tuple[str, str, int] | None:
    """(role, name, incarnation) if `argv` starts a daemon of this run; the inverse of `argv`."""
    match argv:
        case [_, "-P", "-m", module, run, name, incarnation, _]:
            room, _, package = module.partition(".")
            if room == "daemons" and incarnation.isdecimal() and _is_same(run, directory):
                return WORKER if package == SCRIPT else package, name, int(incarnation)
    return None


def _is_same(run: str, directory: Path) -> bool:
    """Whether both paths are one directory, also through a symbolic link."""
    if run == str(directory):
        return True
    with suppress(OSError):
        return os.path.samefile(run, directory)
    return False


def environment(
    role: str, directory: Path, name: str, incarnation: int, *, has_loop: bool = False
) -> dict[str, str]:
    """The environment of a daemon: the inherited one, and variables that user code may rely on.
    A training loop of the user's own gets no RANK: libraries take that, without WORLD_SIZE, for a
    broken group of torch.distributed.
    """
    mine = {
        "DLCTL_JOB": directory.name,
        "DLCTL_NAME": name,
        "DLCTL_ROLE": role,
        "DLCTL_RUN_DIR": str(directory),
        "DLCTL_INCARNATION": str(incarnation),
        "PYTHONUNBUFFERED": "1",
    }
    default = {}
    if not has_loop:
        mine["RANK"] = name.rpartition("-")[2]
    if role == WORKER:
        with suppress(OSError, ValueError):  # The worker itself reports an unreadable job.
            mine |= same_hashes(read_job(directory)["job"]["seed"])
        # A member of a group would warn twice a second while it waits for another one.
        default["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    return {**default, **os.environ, **mine}


def same_hashes(seed: int) -> dict[str, str]:
    """Variables that give sets of strings the same order in all processes of a job: otherwise word
    or class numbers derived from a set would differ between workers, and after a resume.
    """
    return {"PYTHONHASHSEED": str(seed)}


def has_loop(role: str, directory: Path) -> bool:
    """Whether a daemon runs a training loop of the user's own; of an unreadable job the daemon
    itself reports what is wrong.
    """
    if role != WORKER:
        return False
    with suppress(OSError, ValueError, KeyError, TypeError):
        job = read_job(directory)["job"]
        return bool(job.get("script") or job.get("module"))
    return False


def open_log(directory: Path, name: str, incarnation: int) -> int:
    """A file descriptor for a daemon's stdout and stderr, appending: its log file.

    The file contains all output of the process, also of a crash of the interpreter. The daemon's
    own log lines are JSON. Only processes of the daemon write the file.
    """
    path = paths.log_path(directory, name, incarnation)
    path.parent.mkdir(exist_ok=True)
    return regular.descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)


def read_job(directory: Path) -> dict[str, Any]:
    """The resolved job of a run, as `config.from_dict` takes it. Raises OSError and ValueError."""
    return current(json.loads(regular.read_bytes(directory / "job.json")))


# ---------------------------------------------------------------- agents


class StartOrder(NamedTuple):
    """An agent that is to be started."""

    name: str
    incarnation: int
    control: str
    """The coordinator's address."""
    credentials: Credentials


class Ended(NamedTuple):
    """An agent has exited, or could not be started."""

    name: str
    incarnation: int
    status: int | None
    """Exit code or minus a signal; None: unknown, and a retry may help. If the agent could not be
    started, the exit code of the error; 5 (`Unreachable`) may be temporary."""
    error: DlctlError | None = None
    """Why it could not be started, or not be reached to be killed; None: see the end of its log."""
    words: tuple[str, ...] = ()
    """Output of other programs (ssh, Slurm) about that error, line by line."""


class Waiting(NamedTuple):
    """An agent cannot be started yet, because no host is available. Sent repeatedly while that is
    so."""

    name: str
    incarnation: int
    why: str
    """The reason for the user: "job 17 is pending: Resources"."""


class Notice(NamedTuple):
    """A decision of the owner of the hosts (a batch system) that affects the whole run."""

    kind: str
    """"saving": the hosts may be preempted soon: a checkpoint is saved. "ending": the time limit is
    near: the run is saved and stopped. "over": the hosts are gone for good."""
    reason: str


class Going(NamedTuple):
    """The owner is about to take back the host of one agent."""

    name: str
    incarnation: int
    why: str


class Taken(NamedTuple):
    """The host of one agent is gone, with all its processes. The next order for the agent asks for
    another one."""

    name: str
    incarnation: int
    why: str


News = Ended | Waiting | Notice | Going | Taken
"""What a launcher reports to its coordinator."""


class Watcher(Protocol):
    """What a launcher needs of its event loop."""

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Call `ready` whenever `fd` can be read."""
        ...

    def unwatch(self, fd: int) -> None: ...


class AgentControl(Protocol):
    """The agents of one launcher, for their coordinator: starts them, reports which have exited.
    Methods other than `close` never block.
    """

    def start(self, order: StartOrder) -> None:
        """Place an agent. A running agent of the same name is killed first."""
        ...

    def want(self, names: Collection[str]) -> None:
        """Which agents need a host; called if hosts come and go, before the first `start`. The
        hosts of others may be given back."""
        ...

    def kill(self, name: str) -> None:
        """Send SIGKILL to this agent only: its daemons keep running."""
        ...

    def adopt(self, recorded: dict[str, int]) -> dict[str, int]:
        """The running agents, with their incarnations.

        `recorded`: the incarnation of every agent that the previous coordinator placed. The result
        omits agents whose state cannot be determined without blocking.
        """
        ...

    def look(self) -> None:
        """A chore, about once a second: time out operations that are overdue."""
        ...

    def close(self) -> None:
        """Release the hosts: the run and all its agents have ended. The only method that may block,
        for seconds; it sends no reports."""
        ...
