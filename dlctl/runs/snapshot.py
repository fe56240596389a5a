"""The current state of a run: its database, corrected by which processes are alive."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, NotFound
from dlctl.job import config
from dlctl.records.manifest import checkpoint_row
from dlctl.runs import checkpoints, database, lineage, paths, terms
from dlctl.runs.database import ENDED as ENDED
from dlctl.util import processes, regular
from dlctl.util.names import COORDINATOR, HOME_AGENT

LIVE = ("pending", "starting", "running", "degraded", "recovering", "checkpointing", "stopping")
READY = ("running", "degraded", "recovering", "checkpointing")
WITHOUT_PROCESS = (*ENDED, "pending", "queued", "backoff", "quarantined")
"""States of a daemon that is known to have no process."""
GONE = "gone"
"""State of a daemon whose process is missing without a record of its exit."""
UNKNOWN = "unknown"
"""State of a daemon on another host without a current report."""
SILENT = "silent"
"""State of a coordinator whose process is alive but sends no heartbeat."""
STALE_AFTER_S = 5.0
PENDING_MAX_S = 10.0
"""How long a run may exist before its coordinator has written its pid."""
_ROLES = (COORDINATOR, "agent", "server", "worker")


class Unreadable(DlctlError):
    """The database of a run cannot be read: it is damaged, or of another version."""

    def __init__(
        self, directory: Path, message: str, hint: str | None = None, *, is_copy: bool = False
    ) -> None:
        file = directory / database.FILE
        where = directory if is_copy or not file.exists() else file
        super().__init__(message, where=str(where), hint=hint)
        self.directory = directory


@dataclass(frozen=True, slots=True)
class Snapshot:
    directory: Path
    run: Mapping[str, Any]
    """The run's keys, see `dlctl.runs.database`; any may be missing."""
    daemons: list[dict[str, Any]]
    """Agents, servers, workers. Rows of another version may lack keys."""
    state: str
    """The corrected state: "failed" if the run should be live but its coordinator is gone."""
    reason: str
    is_live: bool
    """The run's coordinator is running or about to; or an agent is alive, which restarts it."""
    now: float
    coordinator_pid: int | None = None
    """The process id of the live coordinator; None if there is none."""
    beat_age_s: float | None = None
    """How long ago the coordinator showed that it runs, see `paths.beat_age_s`."""

    @property
    def run_id(self) -> str:
        return self.directory.name

    @property
    def is_gone(self) -> bool:
        """The coordinator died without recording an end: its daemons may still be alive."""
        return self.state == "failed" and self.run.get("state") in LIVE

    @property
    def stale_s(self) -> float | None:
        """Age of the recorded state, if it is stale for a live run."""
        updated_at = self.run.get("updated_at")
        if not self.is_live or not isinstance(updated_at, int | float):
            return None
        age_s = self.now - updated_at
        return age_s if age_s > STALE_AFTER_S else None

    @property
    def silent_s(self) -> float | None:
        """How long the coordinator has sent no heartbeat although its process is alive; None if
        that is short. A coordinator that has just started has yet to send its first one.
        """
        write_age_s = self._write_age_s()
        if write_age_s is None or self.beat_age_s is None:
            return write_age_s
        silent_s = min(write_age_s, self.beat_age_s)
        return silent_s if silent_s > STALE_AFTER_S else None

    @property
    def unwritten_s(self) -> float | None:
        """How long a running coordinator has not been able to write its state; None if it can, or
        if it is not known to run.
        """
        return self._write_age_s() if self.silent_s is None else None

    def _write_age_s(self) -> float | None:
        """How long the live coordinator has written nothing; None if that is short."""
        if self.coordinator_pid is None or self.stale_s is None:
            return None
        write_age_s = min(self.stale_s, self.now - (self._coordinator_since() or 0.0))
        return write_age_s if write_age_s > STALE_AFTER_S else None

    @property
    def is_current(self) -> bool:
        """Whether the run is live and a coordinator keeps its state current."""
        return self.is_live and self.coordinator_pid is not None and self.stale_s is None

    @property
    def coordinator(self) -> dict[str, Any]:
        """The coordinator as a daemon row, with the corrected state."""
        return {
            "name": COORDINATOR,
            "role": COORDINATOR,
            "pid": self.coordinator_pid,
            "pid_start": self.run.get("pid_start"),
            "state": self._coordinator_state(),
            "incarnation": self.run.get("incarnation"),
            "started_at": self._coordinator_since(),
            "updated_at": self.run.get("updated_at"),
        }

    def _coordinator_since(self) -> float | None:
        age_s = processes.age_s(self.run.get("pid_start"))
        return None if age_s is None else self.now - age_s

    def _coordinator_state(self) -> str:
        if self.coordinator_pid is not None:
            if self.silent_s is not None:
                return SILENT
            if self.state in ENDED:
                return "stopping"
            writer = self.run.get("updated_by")
            is_recorded = writer is None or writer == self.run.get("pid_start")
            is_running = self.is_current or self.unwritten_s is not None
            return "running" if is_running and is_recorded else "starting"
        if self.run.get("pid") is None:
            return "pending" if self.is_live else "stopped"
        return "stopped" if self.state in ENDED and not self.is_gone else GONE

    def everybody(self) -> list[dict[str, Any]]:
        """The rows of the coordinator and of all daemons."""
        return [self.coordinator, *self.daemons]

    def daemon(self, name: str) -> dict[str, Any]:
        """The row of one daemon or the coordinator; {} if it has none yet."""
        return next((row for row in self.everybody() if row.get("name") == name), {})

    def roles(self) -> dict[str, str]:
        """Name -> role of every daemon that this run has or will have."""
        names = {*_planned(self.directory), *(row["name"] for row in self.daemons)}
        return {name: name.partition("-")[0] for name in sorted(names, key=natural)}


def load(directory: Path) -> Snapshot:
    """Read a run. Raises NotFound if `directory` is not a run, and Unreadable if it cannot be read
    or its last state is lost: its log is damaged before the end. A live run is not checked for
    that: its coordinator has the state in memory.
    """
    try:
        run = database.read(directory)
    except NotFound as error:
        if not paths.is_run(directory):
            raise
        what = f"the run's database is gone: there is no {database.FILE}"
        raise Unreadable(directory, what) from error
    except DlctlError as error:
        raise Unreadable(directory, error.message, error.hint) from error
    except (sqlite3.Error, ValueError) as error:
        raise Unreadable(directory, f"cannot read the run's database: {error}") from error
    now = time.time()
    there = processes.is_alive(run.get("pid"), run.get("pid_start"))
    state, reason, is_live = _truth(directory, run, now, has_coordinator=there)
    if not is_live:
        _check_terms(directory)
    if isinstance(run.get("checkpoint"), Mapping):
        run["checkpoint"] = _newest_there(directory, run["checkpoint"], is_live)
    rows = [row for row in run.pop("daemons") if type(row.get("name")) is str]
    rows = [_in_truth(row, is_live) for row in rows]
    rows.sort(key=lambda row: natural(row["name"]))
    pid = run["pid"] if there else None
    beat_age_s = None if pid is None else paths.beat_age_s(directory, now)
    return Snapshot(directory, run, rows, state, reason, is_live, now, pid, beat_age_s)


def check_records(directory: Path) -> None:
    """Read all of run.db and of the terms. Raises Unreadable, with the damage."""
    if damage := database.damage(directory):
        raise Unreadable(directory, f"the run's database is damaged: {' '.join(damage.split())}")
    _check_terms(directory)


def _check_terms(directory: Path) -> None:
    if damage := terms.damage(directory):
        raise Unreadable(directory, f"the run's terms are damaged: {damage}")


def _newest_there(
    directory: Path, newest: Mapping[str, Any], is_live: bool
) -> Mapping[str, Any] | None:
    """The record of the newest checkpoint; of an older one if the newest was removed since
    (`checkpoint prune --damaged`) or is damaged, as the run does not roll back to that. None if
    none is left.
    """
    if not isinstance(path := newest.get("path"), str):
        return newest
    here = checkpoints.of_run(directory, path)
    if here.is_dir() and (is_live or not checkpoints.verify(here, hashes=False)):
        return {**newest, "path": str(here)}
    found = lineage.newest_good(directory, hashes=False)
    return None if found is None else checkpoint_row(*found)


def _truth(
    directory: Path, run: Mapping[str, Any], now: float, *, has_coordinator: bool
) -> tuple[str, str, bool]:
    """(state, reason, is_live). An unknown state is passed on unchanged."""
    state, reason = str(run.get("state", "unknown")), str(run.get("reason") or "")
    if state in ENDED:
        return state, reason, False
    if run.get("pid") is None:
        # The command that created the run has yet to start its coordinator, or died before that.
        if abs(now - started(directory)) < PENDING_MAX_S:  # the clock may have been set back
            return state, reason, True
        return "failed", "it was never started", False
    if has_coordinator:
        return state, reason, True
    agents = [row for row in run["daemons"] if row.get("role") == "agent"]
    if processes.working(agents):
        again = "the coordinator is gone; its agent restarts it"
        return ("recovering" if state in READY else state), again, True
    gone = f"the coordinator is gone (pid {run['pid']}, the run was {state})"
    return ("failed" if state in LIVE else state), gone, False


def started(directory: Path) -> float:
    """The time of a run's last start or resume: job.json is written or touched each time."""
    try:
        return (directory / "job.json").stat().st_mtime
    except OSError:
        return 0.0


def _in_truth(row: dict[str, Any], is_live: bool) -> dict[str, Any]:
    """A daemon's row, corrected by whether its process is alive.

    In a live run, a row without a process belongs to a daemon that is about to be started or
    restarted.
    """
    if row.get("state") in WITHOUT_PROCESS:
        return row
    if not is_here(row):
        gone = {"state": UNKNOWN, "phase": "it is, or was, on another host"}
        return row if is_live else row | gone
    pid, start = row.get("pid"), row.get("pid_start")
    is_known = isinstance(pid, int) and isinstance(start, str)
    if (is_live and not is_known) or processes.is_alive(pid, start):
        return row
    return {**row, "state": GONE, "phase": "its process is gone"}


def is_here(row: Mapping[str, Any]) -> bool:
    """Whether this daemon is on this machine, where its process can be checked."""
    return bool(row.get("agent", HOME_AGENT) == HOME_AGENT)


def natural(name: str) -> tuple[int, int, str]:
    """Sorts server-0 before worker-2 before worker-10."""
    role, _, number = name.partition("-")
    rank = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return rank, int(number) if number.isdecimal() else 0, name


def _planned(directory: Path) -> list[str]:
    """The daemons that the job requests, started or not."""
    job = read_job(directory)
    with suppress(TypeError, AttributeError):  # A damaged file.
        listed = sum(bool(host.get("ssh")) for host in job.get("hosts", ()))
        counts = {"agent": 1 + (len(job.get("launcher", {}).get("places", ())) or listed)}
        counts |= {role: job.get(f"{role}s", {}).get("count", 0) for role in ("server", "worker")}
        return [COORDINATOR, *(f"{role}-{i}" for role, n in counts.items() for i in range(n))]
    return [COORDINATOR]


def read_job(directory: Path) -> dict[str, Any]:
    """The resolved job as plain data; {} if it cannot be read."""
    try:
        job = json.loads(regular.read_bytes(directory / "job.json"))
    except (OSError, ValueError):
        return {}
    with suppress(TypeError, AttributeError):  # Damaged: whoever needs the launcher finds it out.
        job = config.current(job)
    return job if isinstance(job, dict) else {}
