"""`begin`: starts an agent on this machine, detached from the connection of the request."""

from __future__ import annotations

import base64
import dataclasses
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
from dlctl import __version__
from dlctl.control.keys import KEY_LETTERS
from dlctl.errors import DlctlError, Unreachable, UsageError, VersionMismatch
from dlctl.job import config, parties
from dlctl.launch import local, partyfiles
from dlctl.launch.base import HOST_FILE, Credentials
from dlctl.runs import paths
from dlctl.util import processes
from dlctl.wire import codec

TASK = "task"
CONNECT_S = 3.0
HELD_S = 10.0
"""Time for another `begin` of the same agent to finish."""
UP_S = 45.0
"""Time for the agent to start its log; an import error is printed before that."""
POLL_S = 0.02


def begin(request: Request) -> dict[str, Any]:
    """Start an agent. An older one of this run and name is killed; its daemons keep running.

    {directory, pid, pid_start}. Raises VersionMismatch, UsageError, Unreachable if the
    coordinator cannot be reached, and DlctlError if the agent did not start.
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
    }


# ---------------------------------------------------------------- the request


def _check_versions(request: Request) -> None:
    version, protocol = field(request, "version", str), field(request, "protocol", int)
    if (version, protocol) != (__version__, codec.PROTOCOL):
        raise VersionMismatch(
            f"this host has dlctl {__version__} with protocol {codec.PROTOCOL}, the request comes "
            f"from {version} with protocol {protocol}: they have to be the same",
            where=os.path.dirname(codec.__file__),
            hint=f"install dlctl {version} there, or set python of this host in [[hosts]]",
        )


def _credentials(request: Request) -> Credentials:
    """Both keys, or none if the connections of the run are not encrypted."""
    keys = Credentials(field(request, "secret", str), field(request, "coordinator_key", str))
    if {len(key) for key in keys} not in ({0}, {KEY_LETTERS}):
        raise UsageError("the keys of the request are invalid")  # Never show them.
    return keys


def _files(request: Request) -> dict[PurePosixPath, bytes]:
    """Path -> content. `taskfiles.collect` has limited them, before they were sent."""
    given = field(request, "files", dict)
    return {_relative(name): _content(name, text) for name, text in given.items()}


def _relative(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or path.suffix != ".py":
        raise UsageError(f"not a relative path of a Python file: {name!r:.200}")
    return path


def _content(name: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        raise UsageError(f"the content of {name!r:.200} did not arrive whole") from None


def _job(request: Request, directory: Path, files: dict[PurePosixPath, bytes]) -> dict[str, Any]:
    """The resolved job, with the path of the user's file on this machine."""
    job: dict[str, Any] = field(request, "job", dict)
    try:
        stored = config.of_stored(job)
        about, path = stored.job, _relative(stored.job.file)
        needed = [_relative(file) for file in parties.files(stored)]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UsageError(f"the job of the request is invalid: {error}") from error
    if not any(each in files for each in needed):
        raise UsageError(f"the job's file {about.file!r:.200} is not among the files")
    here = about.with_file(str(directory / TASK / path))
    moved = partyfiles.with_tasks(job, lambda file: str(directory / TASK / file))
    return {**moved, "job": dataclasses.asdict(here)}


def _reach(control: str) -> None:
    """Connect to the coordinator. Raises Unreachable if that fails: an agent would retry for ever,
    without a report.
    """
    address = urlsplit(control)
    try:
        if address.scheme != "tcp" or not address.hostname or not address.port:
            raise ValueError("it has to be tcp://ADDRESS:PORT")
    except ValueError as error:
        raise UsageError(f"not an address of a coordinator: {control!r:.200}: {error}") from None
    try:
        socket.create_connection((address.hostname, address.port), CONNECT_S).close()
    except OSError as error:
        raise Unreachable(
            f"this host cannot reach the coordinator at {control}: {error.strerror or error}",
            hint="open this port in the coordinator's firewall (port in [network] fixes it), or "
            "set address in [network] to one that this host can reach",
        ) from error


# ---------------------------------------------------------------- the actions


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Create the directory and lock it: another `begin` whose connection was lost may still be
    running, and an agent that exits may be removing the directory.
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
                    words = "another process is starting this agent"
                    raise DlctlError(words, where=str(directory)) from None
            time.sleep(POLL_S)
        yield


def _replace_older(directory: Path, incarnation: int) -> None:
    """Kill older agents. Raises UsageError if a newer one is running: this request is stale."""
    there = agents(directory)
    newest = max((agent.incarnation for agent in there), default=0)
    if newest > incarnation:
        raise UsageError(f"a newer incarnation of this agent, {newest}, is already running")
    ended = kill(there)
    if len(ended) < len(there):
        raise DlctlError("the previous agent cannot be killed", where=str(directory))


def _write(
    directory: Path, agent: str, job: dict[str, Any], files: dict[PurePosixPath, bytes]
) -> None:
    """Replace the files. Running daemons have imported what they need and are not affected."""
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
            hint="set dir of this host in [[hosts]] to a place with enough space",
        ) from error


def _wait_until_up(
    process: subprocess.Popen[bytes], directory: Path, agent: str, incarnation: int
) -> None:
    """Wait until it logs its start. Raises DlctlError with its output if it exits before."""
    path = paths.log_path(directory, agent, incarnation)
    deadline = time.monotonic() + UP_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log_end = " | ".join(last_lines(path)[-3:])
            words = f"the agent has exited at its start (exit {process.returncode}): {log_end}"
            raise DlctlError(words, where=str(path))
        if any(line.endswith(f"starts, pid {process.pid}") for line in last_lines(path)):
            return
        time.sleep(POLL_S)
    process.kill()
    process.wait()
    raise DlctlError(f"the agent has logged nothing in {UP_S:.0f} s", where=str(path))
