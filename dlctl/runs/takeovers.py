"""How often a coordinator has taken the place of another, and how it came to that."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError
from dlctl.runs.database import RunDb
from dlctl.util.names import COORDINATOR

TAKEOVER = "recover"
"""The kind of event that tells of a coordinator which has taken the place of another one."""
DIED = "died"
"""How it comes to that, unless somebody has asked for it."""


@dataclass(slots=True)
class Takeovers:
    takeovers: int = 0
    """How often a coordinator has taken the place of another since the run was started last."""
    taken_over_at: float | None = None
    """When that happened last."""
    takeover: str = ""
    """How it came to that, as the rest of a sentence about the coordinator."""
    forgotten: str = ""
    """What was not on record then, as a sentence."""


def load(directory: Path) -> Takeovers:
    """Read from the events of a run; empty if they cannot be read."""
    try:
        with closing(RunDb(directory, readonly=True)) as db:
            return of(db.events())
    except (sqlite3.Error, DlctlError, ValueError):
        return Takeovers()


def of(events: Iterable[Mapping[str, Any]]) -> Takeovers:
    """The same from events in their order."""
    found = Takeovers()
    before, asked = "", ""
    for event in events:
        name, kind, text = event["daemon"], event["kind"], str(event["text"])
        if kind == TAKEOVER:
            found.takeovers, found.taken_over_at = found.takeovers + 1, event["at"]
            found.takeover, asked = asked or DIED, ""
            found.forgotten = str(event["data"].get("forgotten") or "")
        elif kind == "restart" and name == COORDINATOR:
            asked = "was restarted on request"
        elif kind == "state" and text.startswith(("failed", "stopped")):
            asked = "was brought back"
        elif kind == "state" and text == "starting" and before != TAKEOVER:
            found.takeovers, found.taken_over_at, asked = 0, None, ""
        before = kind
    return found


def about(event: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether an event tells of one of these daemons; one may tell of several."""
    whom = COORDINATOR if event["kind"] == TAKEOVER else str(event["daemon"])
    return not set(whom.split(", ")).isdisjoint(names)
