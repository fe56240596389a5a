"""The disk that a run writes to: whether it is full or dead, and the remedy."""

from __future__ import annotations

import math
import shlex
import shutil

from dlctl.runs import paths
from dlctl.runs.snapshot import Snapshot
from dlctl.util import hints, values

FULL_BYTES = 1_000_000
"""With less free space than this, a run cannot write its state any more."""


def full_disk(snapshot: Snapshot) -> str:
    """As in "runs has 0 B left"; "" if there is enough space to write the run's state."""
    try:
        free: float = shutil.disk_usage(snapshot.directory).free
    except OSError:
        free = math.inf
    folder = values.path(snapshot.directory.parent)
    return f"{folder} has {values.size(free)} left" if free < FULL_BYTES else ""


def facts(snapshot: Snapshot) -> dict[str, str]:
    """Why nothing can be written in the run directory, as the facts of a problem; {} if it can."""
    if why := full_disk(snapshot):
        return {"cause": "full", "why": why, "folder": folder(snapshot)}
    if why := paths.refusal(snapshot.directory):
        why = f"{values.path(snapshot.directory.parent)} is not writable: {why}"
        return {"cause": "read-only", "why": why, "folder": folder(snapshot)}
    return {}


def free_space(snapshot: Snapshot) -> str:
    """The hint for a full disk."""
    return hints.told(f"df -h {folder(snapshot)}", "free space there")


def folder(snapshot: Snapshot) -> str:
    """The directory of all runs, as typed in a shell."""
    return shlex.quote(values.path(snapshot.directory.parent))
