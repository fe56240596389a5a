"""The disk that a run writes to: whether it is full or dead, and what to do about that."""

from __future__ import annotations

import math
import shlex
import shutil
from pathlib import Path

from dlctl.runs import paths
from dlctl.runs.snapshot import Snapshot
from dlctl.util import hints, values

FULL_BYTES = 1_000_000
"""Less room than this on its disk, and a run cannot write any more what is going on."""


def full_disk(snapshot: Snapshot) -> str:
    """As in "runs has 0 B left"; "" if there is room to write what is going on."""
    if (free := _free_bytes(snapshot.directory)) >= FULL_BYTES:
        return ""
    return f"{values.path(snapshot.directory.parent)} has {values.size(free)} left"


def no_room(snapshot: Snapshot) -> str:
    """What that means for a run that lives, as a sentence; "" if there is room."""
    full = full_disk(snapshot) if snapshot.is_live else ""
    return f"{full}: the run's database has no room" if full else ""


def make_room(snapshot: Snapshot) -> str:
    """What to do about a full disk."""
    return hints.told(f"df -h {_place(snapshot)}", "make room there")


def dead_disk(snapshot: Snapshot) -> str:
    """As in "runs takes nothing: Read-only file system"; "" if it does."""
    why = paths.refusal(snapshot.directory)
    return f"{values.path(snapshot.directory.parent)} takes nothing: {why}" if why else ""


def mend_disk(snapshot: Snapshot) -> str:
    """What to do about a file system that has stopped taking anything after an error."""
    what = "see why with dmesg, then check and mount it again"
    return hints.told(f"findmnt -T {_place(snapshot)}", what)


def _place(snapshot: Snapshot) -> str:
    return shlex.quote(values.path(snapshot.directory.parent))


def _free_bytes(directory: Path) -> float:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return math.inf
