"""The disk that a run writes to: whether it is full or read-only."""

from __future__ import annotations

import math
import shlex
import shutil

from dlctl.runs import paths
from dlctl.runs.snapshot import Snapshot
from dlctl.util import values

FULL_BYTES = 1_000_000
"""With less free space than this, a run cannot write its state any more."""


def full(snapshot: Snapshot) -> dict[str, str]:
    """That the disk is full, as the facts of a problem; {} if there is room for the run's state."""
    try:
        free: float = shutil.disk_usage(snapshot.directory).free
    except OSError:
        free = math.inf
    why = f"{values.path(snapshot.directory.parent)} has {values.size(free)} left"
    found = {"cause": "full", "why": why, "folder": folder(snapshot)}
    return found if free < FULL_BYTES else {}


def facts(snapshot: Snapshot) -> dict[str, str]:
    """Why nothing can be written in the run directory, as the facts of a problem; {} if it can."""
    refused = paths.refusal(snapshot.directory)
    why = f"{values.path(snapshot.directory.parent)} is not writable: {refused}"
    found = {"cause": "read-only", "why": why, "folder": folder(snapshot)}
    return full(snapshot) or (found if refused else {})


def folder(snapshot: Snapshot) -> str:
    """The directory of all runs, as typed in a shell."""
    return shlex.quote(values.path(snapshot.directory.parent))
