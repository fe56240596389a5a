"""What is wrong with a daemon, as a sentence with the command that helps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dlctl.cli.snapshot import Snapshot
from dlctl.control import unresponsive

RECENT_S = 60.0
"""A daemon that has taken another one's place is told of for so long."""
Row = Mapping[str, Any]


class Trouble(NamedTuple):
    name: str
    what: str
    """The rest of a sentence that begins with the name; plain text."""
    next: str
    """The command that helps, or tells more; "" if there is nothing to do."""
    at: float | None
    """When it began, seconds since 1970; None if nobody knows."""
    incarnation: int
    """Of the process in whose log there may be more of it."""
    is_over: bool = False
    """Its next process is at work."""
    is_grave: bool = True


def incarnation(row: Row) -> int:
    """The number of a daemon's process; 0 if it has had none."""
    number = row.get("incarnation")
    return number if type(number) is int else 0


def replaced(snapshot: Snapshot, limits: int = 1) -> str:
    return unresponsive.replaced(limits * unresponsive.limit_s(snapshot.directory))
