"""`end`: ends an agent and its daemons on this machine, and may remove its files. Idempotent."""

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
"""An agent may start a daemon while it is being terminated."""


def end(request: Request) -> dict[str, Any]:
    """End the daemons of an agent, or only the agent itself, and remove its files on request.

    Without `only_agent`, all get SIGTERM, and SIGKILL after `grace_s`. With it, the agent is killed
    at once: its daemons keep running. {ended: [{name, incarnation, ...}], left: [...], removed}
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
    """The running agents of this directory."""
    return [daemon for daemon in local.living(directory) if daemon.role == "agent"]


def kill(daemons: list[local.Living]) -> list[dict[str, Any]]:
    """Send SIGKILL; returns the rows of the daemons that have exited."""
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
    """Remove the stored states of servers, and the directory. Returns the paths.

    Raises NotPermitted if this user may not remove some of it.
    """
    # Imported here: ending a hung process must be quick, without importing numpy.
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
                parent.rmdir()  # Unless it contains files of another run.
    return removed
