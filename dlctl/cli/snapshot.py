"""A run as it is now: what its database says, corrected by which processes are really there."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlctl import processes, rundb
from dlctl.errors import DlctlError

ENDED = ("stopped", "finished", "failed")
LIVE = ("pending", "starting", "running", "degraded", "recovering", "checkpointing", "stopping")
READY = ("running", "degraded", "recovering", "checkpointing")
DAEMON_TROUBLES = ("slow", "backoff", "recovering", "quarantined", "failed", "unknown")
STALE_AFTER_S = 5.0
PENDING_MAX_S = 10.0
"""How long a run may exist before its coordinator has written its pid."""
_ROLES = ("coordinator", "agent", "server", "worker")


@dataclass(frozen=True, slots=True)
class Snapshot:
    directory: Path
    run: Mapping[str, Any]
    """The run's keys, see `rundb`; any may be missing."""
    daemons: list[dict[str, Any]]
    """In the order coordinator, agents, servers, workers. Rows of another version may lack keys."""
    state: str
    """The state in truth: "failed" if it should live and its coordinator is gone."""
    reason: str
    is_live: bool
    """Its coordinator works, or is about to; or an agent is there, which starts it again."""
    now: float

    @property
    def run_id(self) -> str:
        return self.directory.name

    @property
    def is_gone(self) -> bool:
        """The coordinator died without a word: its daemons may still be there."""
        return self.state == "failed" and self.run.get("state") in LIVE

    @property
    def stale_s(self) -> float | None:
        """Age of what we know, if that is too old for a live run."""
        updated_at = self.run.get("updated_at")
        if not self.is_live or not isinstance(updated_at, int | float):
            return None
        age_s = self.now - updated_at
        return age_s if age_s > STALE_AFTER_S else None

    def daemon(self, name: str) -> dict[str, Any]:
        """The row of one daemon; {} if it has none yet."""
        return next((row for row in self.daemons if row.get("name") == name), {})

    def roles(self) -> dict[str, str]:
        """Name -> role of every daemon that this run has or will have."""
        names = {row["name"]: str(row.get("role", "")) for row in self.daemons}
        for name in _planned(self.directory):
            names.setdefault(name, name.partition("-")[0])
        return {name: names[name] for name in sorted(names, key=natural)}


def load(directory: Path) -> Snapshot:
    """Read a run. Raises NotFound or DlctlError if `directory` is no run that we can read."""
    try:
        run = rundb.read(directory)
    except (sqlite3.Error, ValueError) as error:
        raise DlctlError(
            f"cannot read the run's database: {error}", where=str(directory / rundb.FILE)
        ) from error
    now = time.time()
    state, reason, is_live = _truth(directory, run, now)
    rows = [row for row in run.pop("daemons") if type(row.get("name")) is str]
    if state == "failed" and run.get("state") in LIVE:
        rows = [_without_coordinator(row) for row in rows]
    rows.sort(key=lambda row: natural(row["name"]))
    return Snapshot(directory, run, rows, state, reason, is_live, now)


def _truth(directory: Path, run: Mapping[str, Any], now: float) -> tuple[str, str, bool]:
    """(state, reason, whether it lives). A state that we do not know is passed on as it is."""
    state, reason = str(run.get("state", "unknown")), str(run.get("reason") or "")
    if state in ENDED:
        return state, reason, False
    if run.get("pid") is None:
        # The command that made the run has yet to start its coordinator, or died before it could.
        if now - started(directory) < PENDING_MAX_S:
            return state, reason, True
        return "failed", "it was never started", False
    if processes.is_alive(run["pid"], run.get("pid_created")):
        return state, reason, True
    agents = [row for row in run["daemons"] if row.get("role") == "agent"]
    if processes.living(agents):
        again = "the coordinator is gone; its agent starts it again"
        return ("recovering" if state in READY else state), again, True
    gone = f"the coordinator is gone (pid {run['pid']}, the run was {state})"
    return ("failed" if state in LIVE else state), gone, False


def started(directory: Path) -> float:
    """When a run was started or resumed last: job.json is written each time."""
    try:
        return (directory / "job.json").stat().st_mtime
    except OSError:
        return 0.0


def _without_coordinator(row: dict[str, Any]) -> dict[str, Any]:
    """Nobody keeps this row up to date any more: look for the process ourselves."""
    if row.get("state") in ENDED or processes.is_alive(row.get("pid"), row.get("pid_created")):
        return row
    return {**row, "state": "unknown", "phase": "its process is gone"}


def natural(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Sorts server-0 before worker-2 before worker-10."""
    role = name.partition("-")[0]
    rank = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    parts = re.split(r"(\d+)", name)
    return rank, [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _planned(directory: Path) -> list[str]:
    """Names that the job asks for, whether or not they have started."""
    job = read_job(directory)
    names = ["coordinator", "agent-0"]
    for role in ("server", "worker"):
        section = job.get(f"{role}s")
        count = section.get("count") if isinstance(section, dict) else None
        names += [f"{role}-{i}" for i in range(count if type(count) is int else 0)]
    return names


def read_job(directory: Path) -> dict[str, Any]:
    """The resolved job as plain data; {} if it cannot be read."""
    try:
        job = json.loads((directory / "job.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return job if isinstance(job, dict) else {}
