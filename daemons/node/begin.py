"""`begin`: an agent on this machine, detached from the connection that has asked for it."""

from __future__ import annotations

import base64
import binascii
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from daemons.log_tail import last_lines
from daemons.node.end import agents, kill
from daemons.node.requests import Request, field, host_directory, make, name_of_agent, natural
from dlctl import __version__, config, wire
from dlctl.control.keys import KEY_LETTERS
from dlctl.errors import DlctlError, Unreachable, UsageError, VersionMismatch
from dlctl.launch import local, taskfiles
from dlctl.launch.base import HOST_FILE, Credentials
from dlctl.runs import paths
from dlctl.util import processes

TASK = "task"
CONNECT_S = 3.0
HELD_S = 10.0
"""For another `begin` of the same agent to come to its end."""
UP_S = 45.0
"""For the agent to begin its log; what it cannot import it says before that."""
POLL_S = 0.02


def begin(request: Request) -> dict[str, Any]:
    """Place an agent; an older one of this run and name is killed, its daemons live on.

    {directory, pid, pid_start, host}. Raises VersionMismatch, UsageError, Unreachable if the
    coordinator cannot be reached from here, and DlctlError if the agent did not start.
    """
    _check_versions(request)
    agent, directory = name_of_agent(request), host_directory(request)
    incarnation, control = natural(request, "incarnation"), field(request, "control", str)
    credentials = _credentials(request)
    files = _files(request)
    job = _job(request, directory, files)
    _reach(control)
    with _alone(directory):
        _replace_older(directory, incarnation)
        _write(directory, agent, job, files)
        process = local.start(directory, "agent", agent, incarnation, control, credentials)
        _wait_until_up(process, directory, agent, incarnation)
    return {
        "directory": str(directory),
        "pid": process.pid,
        "pid_start": processes.start_of(process.pid),
        "host": socket.gethostname(),
    }


# ---------------------------------------------------------------- what is asked


def _check_versions(request: Request) -> None:
    version, protocol = field(request, "version", str), field(request, "protocol", int)
    if (version, protocol) != (__version__, wire.PROTOCOL):
        raise VersionMismatch(
            f"here is dlctl {__version__} with protocol {wire.PROTOCOL}, and {version} with "
            f"protocol {protocol} has asked: they have to be the same",
            where=os.path.dirname(wire.__file__),
            hint=f"install dlctl {version} there, or set python of this host in [[hosts]]",
        )


def _credentials(request: Request) -> Credentials:
    """Both keys, or none if the connections of the run have none."""
    keys = Credentials(field(request, "secret", str), field(request, "coordinator_key", str))
    if {len(key) for key in keys} not in ({0}, {KEY_LETTERS}):
        raise UsageError("the keys of the request are none")  # Never showing them.
    return keys


def _files(request: Request) -> dict[PurePosixPath, bytes]:
    given = field(request, "files", dict)
    if len(given) > taskfiles.FILES_MAX:
        raise UsageError(f"{len(given)} files are more than {taskfiles.FILES_MAX}")
    files = {_relative(name): _content(name, text) for name, text in given.items()}
    if sum(map(len, files.values())) > taskfiles.BYTES_MAX:
        raise UsageError(f"the task's files have more than {taskfiles.BYTES_MAX:,} bytes")
    return files


def _relative(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or path.suffix != ".py":
        raise UsageError(f"this is no path of a Python file beside the job: {name!r:.200}")
    return path


def _content(name: str, text: object) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "-", validate=True)
    except (binascii.Error, ValueError):
        raise UsageError(f"the content of {name!r:.200} did not arrive whole") from None


def _job(request: Request, directory: Path, files: dict[PurePosixPath, bytes]) -> dict[str, Any]:
    """The resolved job, with its task where it is here."""
    job: dict[str, Any] = field(request, "job", dict)
    try:
        file, _, name = config.from_dict(config.JobFile, job).job.task.rpartition(":")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UsageError(f"the job of the request is none: {error}") from error
    if _relative(file) not in files:
        raise UsageError(f"the task's file {file!r:.200} is not among the files")
    task = f"{directory / TASK / file}:{name}"
    return {**job, "job": {**job["job"], "task": task}}


def _reach(control: str) -> None:
    """Raises Unreachable if nobody can be connected to at the coordinator's address: an agent would
    try for ever, and nobody would hear of it.
    """
    address = urlsplit(control)
    try:
        if address.scheme != "tcp" or not address.hostname or not address.port:
            raise ValueError("it has to be tcp://ADDRESS:PORT")
    except ValueError as error:
        raise UsageError(
            f"this is no address of a coordinator: {control!r:.200}: {error}"
        ) from None
    try:
        socket.create_connection((address.hostname, address.port), CONNECT_S).close()
    except OSError as error:
        raise Unreachable(
            f"the coordinator cannot be reached from here at {control}: {error.strerror or error}",
            hint="open it in the firewall there (port in [network] makes it always the same), or "
            "set address in [network] to one that this host can reach",
        ) from error


# ---------------------------------------------------------------- what is done


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Make the directory, and hold it: the connection of another `begin` may be gone while it still
    works, and an agent that has left may be removing it.
    """
    deadline = time.monotonic() + HELD_S
    with ExitStack() as ours:
        while True:
            make(directory)
            try:
                ours.enter_context(paths.held(directory))
                break
            except (BlockingIOError, FileNotFoundError):
                if time.monotonic() > deadline:
                    words = "somebody else is just starting this agent"
                    raise DlctlError(words, where=str(directory)) from None
            time.sleep(POLL_S)
        yield


def _replace_older(directory: Path, incarnation: int) -> None:
    """Raises UsageError if there is a newer one: this request has been overtaken."""
    there = agents(directory)
    newest = max((agent.incarnation for agent in there), default=0)
    if newest > incarnation:
        raise UsageError(f"incarnation {newest} of this agent is here already, and is newer")
    ended = kill(there)
    if len(ended) < len(there):
        raise DlctlError("the agent before this one cannot be ended", where=str(directory))


def _write(
    directory: Path, agent: str, job: dict[str, Any], files: dict[PurePosixPath, bytes]
) -> None:
    """Daemons that live have imported what they need: they are not disturbed by newer files."""
    fresh, task = directory / f".{TASK}.new", directory / TASK
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(mode=0o700)
        for path, content in files.items():
            target = fresh / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        for name, value in ((HOST_FILE, {"agent": agent}), ("job.json", job)):
            paths.write(directory / name, json.dumps(value, indent=1).encode(), 0o600)
        shutil.rmtree(task, ignore_errors=True)
        fresh.replace(task)
    except OSError as error:
        raise DlctlError(
            f"cannot write the files of this run: {error.strerror}",
            where=str(error.filename or directory),
            hint="set dir of this host in [[hosts]] to a place with room",
        ) from error


def _wait_until_up(
    process: subprocess.Popen[bytes], directory: Path, agent: str, incarnation: int
) -> None:
    """Until it writes its log in our form. Raises DlctlError with its words if it ends before."""
    path = paths.log_path(directory, agent, incarnation)
    deadline = time.monotonic() + UP_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = " | ".join(last_lines(path)[-3:])
            words = f"the agent has ended at its start (exit {process.returncode}): {said}"
            raise DlctlError(words, where=str(path))
        if any(line.endswith(f"starts, pid {process.pid}") for line in last_lines(path)):
            return
        time.sleep(POLL_S)
    process.kill()
    process.wait()
    raise DlctlError(f"the agent has said nothing in {UP_S:.0f} s", where=str(path))
