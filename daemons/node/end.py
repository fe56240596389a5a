"""`end`: ends an agent and its daemons on this machine, and may remove its files. Idempotent."""

from __future__ import annotations

import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from daemons.node.requests import Request, field, host_directory, is_there, natural
from dlctl.errors import NotPermitted
from dlctl.launch import local
from dlctl.util import processes

ROUNDS_MAX = 3
"""An agent may start a daemon while it is being terminated."""


def end(request: Request) -> dict[str, Any]:
    """End the daemons of an agent, or only the agent itself, and remove its files on request.

    Without `only_agent`, all get SIGTERM, and SIGKILL after `grace_s`. With it, the agent is killed
    at once: its daemons keep running. {ended, left}: names of daemons.
    """
    directory = host_directory(request)
    grace_s, purge = natural(request, "grace_s"), field(request, "purge", bool)
    if field(request, "only_agent", bool):
        ended, left = kill(agents(directory)), agents(directory)
    else:
        ended, left = _end_all(directory, grace_s)
    if purge and not left:
        purge_files(directory)
    return {"ended": ended, "left": [daemon.name for daemon in left]}


def agents(directory: Path) -> list[local.Living]:
    """The running agents of this directory."""
    return [daemon for daemon in local.living(directory) if daemon.role == "agent"]


def kill(daemons: list[local.Living]) -> list[str]:
    """Send SIGKILL; returns the names of the daemons that have exited."""
    rows = [daemon.row() for daemon in daemons]
    for each in rows:
        with suppress(PermissionError):
            processes.send_signal(each["pid"], each["pid_start"], signal.SIGKILL)
    left = processes.wait(rows, processes.KILL_S)
    return [each["name"] for each in rows if each not in left]


def _end_all(directory: Path, grace_s: float) -> tuple[list[str], list[local.Living]]:
    ended: list[str] = []
    for _ in range(ROUNDS_MAX):
        rows = [daemon.row() for daemon in local.living(directory)]
        if not rows:
            return ended, []
        ended += processes.end(rows, grace_s)[0]
    return ended, list(local.living(directory))


def purge_files(directory: Path) -> None:
    """Remove the stored states of servers, and the directory.

    Raises NotPermitted if this user may not remove some of it.
    """
    # Imported here: ending a hung process must be quick, without importing numpy.
    from daemons.node.look import servers_of
    from dlctl.runs import kept_shards

    kept_shards.remove(directory, servers_of(directory))
    if is_there(directory):
        try:
            shutil.rmtree(directory)
        except PermissionError as error:
            where = str(error.filename or directory)
            raise NotPermitted("cannot remove the files of this run", where=where) from error
        for parent in directory.parents[:2]:
            with suppress(OSError):
                parent.rmdir()  # Unless it contains files of another run.
