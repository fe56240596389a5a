"""`look`: reports what exists of a run on this machine. Read-only."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

from daemons.node.requests import Request, host_directory, row
from dlctl import __version__, config, wire
from dlctl.errors import DlctlError
from dlctl.launch import local
from dlctl.runs import kept_shards

SHARED_MEMORY = Path("/dev/shm")


def look(request: Request) -> dict[str, Any]:
    """The running daemons, the stored states of servers, free space and versions.

    {daemons: [{role, name, incarnation, pid, pid_start}], kept: [...] as `kept_shards.Kept`,
    free_bytes: {directory, shm}, directory, is_there, host, versions}
    """
    directory = host_directory(request)
    servers = servers_of(directory)
    return {
        "host": socket.gethostname(),
        "directory": str(directory),
        "is_there": directory.is_dir(),
        "daemons": [row(daemon) for daemon in local.living(directory)],
        "kept": [_kept(found) for found in kept_shards.kept(directory, servers)],
        "free_bytes": {"directory": free_bytes(directory), "shm": free_bytes(SHARED_MEMORY)},
        "versions": versions(),
    }


def servers_of(directory: Path) -> config.Servers:
    """The [servers] options of this run; the defaults if this host does not have the job.

    Raises DlctlError if the job is damaged.
    """
    path = directory / "job.json"
    try:
        return config.from_dict(config.JobFile, json.loads(path.read_text())).servers
    except FileNotFoundError:
        return config.Servers()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = f"cannot read the job: {type(error).__name__}: {error}"
        raise DlctlError(text, where=str(path)) from error


def free_bytes(path: Path) -> int:
    """On the file system of this path, or of its nearest existing parent."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def versions() -> dict[str, Any]:
    """Installed versions; does not import torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {
        "dlctl": __version__,
        "protocol": wire.PROTOCOL,
        "python": platform.python_version(),
        "torch": torch,
    }


def _kept(found: kept_shards.Kept) -> dict[str, Any]:
    size_bytes = found.path.lstat().st_size if found.path.exists() else 0
    return {**dataclasses.asdict(found), "path": str(found.path), "bytes": size_bytes}
