"""`end`: nothing of an agent is left on this machine. Doing it again does no harm."""

from __future__ import annotations

import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from daemons.node.requests import Request, field, host_directory, is_there, natural, row
from dlctl.errors import NotPermitted
from dlctl.launch import local
from dlctl.util import processes

ROUNDS_MAX = 3
"""An agent may start a daemon while it is being ended."""


def end(request: Request) -> dict[str, Any]:
    """End the daemons of an agent here, or only the agent itself, and remove its files if asked.

    Without `only_agent`, all get SIGTERM, and SIGKILL after `grace_s`. The agent alone is killed at
    once: its daemons are to live on. {ended: [{name, incarnation, ...}], left: [...], removed}
    """
    directory = host_directory(request)
    grace_s, purge = natural(request, "grace_s"), field(request, "purge", bool)
    if field(request, "only_agent", bool):
        ended, left = kill(agents(directory)), agents(directory)
    else:
        ended, left = _end_all(directory, grace_s)
    removed = purge_files(directory) if purge and not left else []
    return {"ended": ended, "left": [row(daemon) for daemon in left], "removed": removed}


def agents(directory: Path) -> list[local.Living]:
    """The agents of this directory that live."""
    return [daemon for daemon in local.living(directory) if daemon.role == "agent"]


def kill(daemons: list[local.Living]) -> list[dict[str, Any]]:
    """SIGKILL; returns the rows of those that have ended by it."""
    rows = [row(daemon) for daemon in daemons]
    for each in rows:
        with suppress(PermissionError):
            processes.send_signal(each["pid"], each["pid_start"], signal.SIGKILL)
    left = processes.wait(rows, processes.KILL_S)
    return [each for each in rows if each not in left]


def _end_all(directory: Path, grace_s: float) -> tuple[list[dict[str, Any]], list[local.Living]]:
    ended: list[dict[str, Any]] = []
    for _ in range(ROUNDS_MAX):
        rows = [row(daemon) for daemon in local.living(directory)]
        if not rows:
            return ended, []
        names, _ = processes.end(rows, grace_s)
        ended += [each for each in rows if each["name"] in names]
    return ended, list(local.living(directory))


def purge_files(directory: Path) -> list[str]:
    """Remove what servers have kept here, and the directory. Returns the paths.

    Raises NotPermitted if something of it is not ours to remove.
    """
    # Only here: to end what hangs must be quick, and go without numpy.
    from daemons.node.look import servers_of
    from dlctl.runs import kept_shards

    servers = servers_of(directory)
    removed = [str(path) for path in kept_shards.remove(directory, servers)]
    if is_there(directory):
        try:
            shutil.rmtree(directory)
        except PermissionError as error:
            where = str(error.filename or directory)
            raise NotPermitted("cannot remove the files of this run", where=where) from error
        removed.append(str(directory))
        for parent in directory.parents[:2]:
            with suppress(OSError):
                parent.rmdir()  # If there is nothing of another run in it.
    return removed
