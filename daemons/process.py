"""Start and exit of all daemons: arguments, log, job, exit code, and the last log lines."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from daemons import logs
from dlctl import __version__
from dlctl.errors import DlctlError
from dlctl.job import config
from dlctl.launch.base import HOST_FILE, NO_CREDENTIALS, Credentials
from dlctl.runs import paths
from dlctl.util import hints, regular
from dlctl.util.names import HOME_AGENT
from dlctl.wire.messages import Register

log = logging.getLogger("dlctl")


@dataclass(frozen=True, slots=True)
class DaemonContext:
    """The start parameters of a daemon."""

    directory: Path
    """The run directory, or its counterpart on another machine (`daemons.node`)."""
    control: str
    """The coordinator's address; "" for the coordinator itself."""
    registration: Register
    job: config.JobFile
    credentials: Credentials
    log_handler: logs.Rotating
    agent: str = HOME_AGENT
    """The agent of this machine."""

    @property
    def is_home(self) -> bool:
        """Whether this is the coordinator's machine, with its process and its database. Other
        machines only have its messages.
        """
        return self.agent == HOME_AGENT

    @property
    def is_guest(self) -> bool:
        """Whether it has joined from elsewhere, and can only dial out."""
        return self.agent.startswith("guest-")


def read_job(directory: Path) -> config.JobFile:
    return config.of_stored(json.loads(regular.read_bytes(directory / "job.json")))


def agent_of(directory: Path) -> str:
    """The agent of the machine with this run directory or counterpart."""
    try:
        agent: str = json.loads(regular.read_bytes(directory / HOST_FILE))["agent"]
    except FileNotFoundError:
        return HOME_AGENT
    return agent


def read_credentials(fd: int) -> Credentials:
    """The credentials that the parent process has written to standard input; none if that is not a
    pipe. They never appear in the environment, on the disk or in a command line.
    """
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return NO_CREDENTIALS
    with os.fdopen(os.dup(fd), "rb") as stream:
        credentials = Credentials(**json.loads(stream.read()))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), fd)
    return credentials


def reason_of(error: Exception) -> str:
    """What failed and where, in one line; an unexpected error is reported as a bug."""
    if isinstance(error, DlctlError):
        is_included = not error.where or error.where in error.message
        return error.message if is_included else f"{error.message} ({error.where})"
    if isinstance(error, OSError):
        return str(error)
    return f"a bug in dlctl: {type(error).__name__}: {error}"


def in_words(error: DlctlError) -> str:
    """`reason_of` with the hint: as the reason that a run ended."""
    return "; ".join(filter(None, (reason_of(error), hints.in_a_line(error.hint))))


def print_error(error: DlctlError) -> None:
    """Print one line of JSON on standard error, for the calling program."""
    facts = {"message": error.message, "where": error.where, "hint": error.hint}
    print(json.dumps(facts), file=sys.stderr)


def leave_garbage_to_parents() -> None:
    """Have forked children, as those of torch's DataLoader, never collect what their parent had:
    objects with threads, as groups of torch.distributed, would abort a child that has no such
    threads.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def main(
    role: str, body: Callable[[DaemonContext], int], end: Callable[[int], None] = lambda _: None
) -> None:
    """Run a daemon: `python -m daemons.ROLE RUN_DIRECTORY NAME INCARNATION CONTROL_ADDRESS`.

    end: called with the exit code before the process exits, for any reason.
    """
    if len(sys.argv) != 5:
        sys.exit(f"usage: python -m daemons.{role} RUN_DIRECTORY NAME INCARNATION CONTROL_ADDRESS")
    directory, name, incarnation = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    handler = logs.set_up(name, incarnation, paths.log_path(directory, name, incarnation))
    faulthandler.enable()
    leave_garbage_to_parents()
    try:
        # The name of this machine: as set by the process that starts the daemons, or its own.
        host = os.environ.get("DLCTL_HOST") or socket.gethostname()
        registration = Register(
            directory.name, role, name, incarnation, os.getpid(), host, __version__
        )
        job, credentials = read_job(directory), read_credentials(sys.stdin.fileno())
        log.info("%s starts, pid %d", name, os.getpid())
        agent = agent_of(directory)
        code = body(
            DaemonContext(directory, sys.argv[4], registration, job, credentials, handler, agent)
        )
    except DlctlError as error:
        log.error("%s", in_words(error))
        code = error.exit_code
    except Exception as error:
        log.exception("a bug in dlctl: %s: %s", type(error).__name__, error)
        code = 70
    end(code)
    logging.shutdown()
    # So that atexit functions and threads of user code cannot block the exit.
    os._exit(code)
