"""`look`: reports what exists of a run on this machine. Read-only."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from daemons.node.requests import Request, host_directory
from dlctl.errors import DlctlError
from dlctl.job import config
from dlctl.launch import local
from dlctl.runs import kept_shards
from dlctl.util import regular


def look(request: Request) -> dict[str, Any]:
    """The running daemons, and the stored states of servers.

    {daemons: [{name, pid, pid_start}], kept: [...] as `kept_shards.Kept`}
    """
    directory = host_directory(request)
    kept = kept_shards.kept(directory, servers_of(directory))
    return {
        "daemons": [daemon.row() for daemon in local.living(directory)],
        "kept": [{**dataclasses.asdict(found), "path": str(found.path)} for found in kept],
    }


def servers_of(directory: Path) -> config.Servers:
    """The [servers] options of this run; the defaults if this host does not have the job.

    Raises DlctlError if the job is damaged.
    """
    path = directory / "job.json"
    try:
        return config.of_stored(json.loads(regular.read_bytes(path))).servers
    except FileNotFoundError:
        return config.Servers()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = f"cannot read the job: {type(error).__name__}: {error}"
        raise DlctlError(text, where=str(path)) from error
