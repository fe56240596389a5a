"""Facts about a run and its daemons, for display."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import ENDED, Snapshot
from dlctl.util import values
from dlctl.util.names import COORDINATOR
from dlctl.util.text import escape

Row = Mapping[str, Any]
TAKEOVER = "recover"
"""The kind of event that reports the takeover by a new coordinator."""


def became(state: str) -> str:
    """A state as a predicate: "is running", "has failed"."""
    return f"{'has' if state in ENDED else 'is'} {state}"


def metrics(row: Row) -> Row:
    """The metrics of a daemon; {} if it has not reported any."""
    found = row.get("metrics")
    return found if isinstance(found, Mapping) else {}


def settings(row: Row) -> Row:
    found = metrics(row).get("settings")
    return found if isinstance(found, Mapping) else {}


def text(value: Any) -> str:
    """Text from the database, escaped; "" if there is none."""
    return escape(value) if isinstance(value, str) else ""


def has_begun(snapshot: Snapshot) -> bool:
    """Whether its workers were released: there may be updates even if no step counts yet."""
    return snapshot.run.get("ready_at") is not None or bool(snapshot.run.get("step"))


def ran_s(snapshot: Snapshot) -> float | None:
    """How long a run has run, from its first start on, without what it lay stopped or dead, in
    seconds; None if it has not.
    """
    run = snapshot.run
    before_s, dead_s = (values.number(run.get(key)) or 0.0 for key in ("ran_s", "dead_s"))
    began = values.number(run.get("started_at"))
    ended = values.number(run.get("ended_at") or run.get("updated_at"))
    until = snapshot.now if snapshot.is_live else ended
    if began is None or until is None:
        return before_s or None
    return before_s + max(0.0, until - began - dead_s)


def steps_after(snapshot: Snapshot, step: float) -> int:
    """The recorded steps of a run after this one."""
    return max(0, int((values.number(snapshot.run.get("step")) or 0) - step))


def incarnation(row: Row | None) -> int:
    """The number of a daemon's process; 0 if it has had none so far."""
    found = row.get("incarnation") if row is not None else None
    return found if type(found) is int else 0


def takeovers(directory: Path) -> list[tuple[float, dict[str, str]]]:
    """(time, facts of "coordinator-restarted") of the takeovers since the last start of the run,
    from its readable events.
    """
    found, before, how = list[tuple[float, dict[str, str]]](), "", ""
    with (
        suppress(sqlite3.Error, DlctlError, ValueError),
        closing(RunDb(directory, readonly=True)) as db,
    ):
        for event in db.events():
            kind, message = event["kind"], str(event["text"])
            if kind == TAKEOVER:
                forgotten = str(event["data"].get("forgotten") or "")
                found.append((event["at"], {"how": how or "died", "forgotten": forgotten}))
                how = ""
            elif kind == "restart" and event["daemon"] == COORDINATOR:
                how = "was restarted on request"
            elif kind == "state" and message.startswith(("failed", "stopped")):
                how = "was recovered"
            elif kind == "state" and message == "starting" and before != TAKEOVER:
                found, how = [], ""
            before = kind
    return found


def is_about(event: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether an event concerns one of these daemons; an event may concern several."""
    daemons = COORDINATOR if event["kind"] == TAKEOVER else str(event["daemon"])
    return not set(daemons.split(", ")).isdisjoint(names)
