"""Waiting until a run is ready: whom it waits for, and what went wrong if it never will be."""

from __future__ import annotations

import subprocess
import time
from contextlib import closing, suppress
from typing import Any

from dlctl.errors import JobFailed, TimedOut
from dlctl.ops import next_step, other_hosts, recover, stop
from dlctl.ops.run_directory import Launched
from dlctl.runs import facts, logs
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import ENDED, READY, Snapshot, load, read_job
from dlctl.util import hints, notes, values
from dlctl.util.text import escape, is_birth, is_poisoned

POLL_S = 0.1
MARGIN_S = 30.0
"""On top of the job's own limit, after which the coordinator gives up by itself."""
OVER_S = 60.0
"""For a run that ends as soon as it is ready."""
LAST_LINES = 12
DEATH_S = 2.0


def wait_ready(
    launched: Launched,
    timeout_s: float | None,
    progress: notes.Phases,
) -> Snapshot:
    """Wait until all daemons are ready (by then the run may even have ended), also when a run is
    brought back.

    Raises JobFailed with the last words of the daemon that failed, when nothing is left running;
    TimedOut if `timeout_s` has passed first: the run then goes on starting.
    """
    began = time.monotonic()
    limit_s = timeout_s if timeout_s is not None else _ready_s(launched) + MARGIN_S
    while True:
        snapshot = load(launched.directory)
        if _is_ready(snapshot, launched):
            return snapshot
        if not snapshot.is_live:
            what = "could not be brought back" if launched.goes_on else "did not start"
            raise failed(launched, what)
        waited_s = time.monotonic() - began
        state, late = snapshot.state, waiting_for(snapshot)
        if launched.goes_on:
            state, late = "recovering", recover.whom(snapshot)
        if waited_s > limit_s:
            raise TimedOut(
                f"{snapshot.run_id} is not ready after {values.duration(limit_s)} and goes on "
                f"starting; it waits for {late or 'its coordinator'}",
                hint=hints.either(
                    f"dlctl wait --for ready -j {snapshot.run_id}",
                    f"dlctl stop -j {snapshot.run_id}",
                ),
            )
        progress.phase(state, late, waited_s)
        time.sleep(POLL_S)


def _is_ready(snapshot: Snapshot, launched: Launched) -> bool:
    if launched.goes_on:
        return recover.is_back(snapshot)
    is_at_work = snapshot.state in (*READY, "finished")
    return is_at_work or snapshot.run.get("ready_at") is not None


def wait_for_end(
    launched: Launched, snapshot: Snapshot, limit_s: float | None, progress: notes.Phases
) -> Snapshot:
    """Of a run that we have started and that comes to its end already, as when the task raises at
    once: what there is to say is how it ended. It is waited for at most `OVER_S`, or `limit_s`.
    """
    began = time.monotonic()
    limit_s = OVER_S if limit_s is None else min(limit_s, OVER_S)
    while launched.process is not None and snapshot.state == "stopping" and snapshot.is_live:
        if (waited_s := time.monotonic() - began) > limit_s:
            break
        progress.phase(snapshot.state, waiting_for(snapshot), waited_s)
        time.sleep(POLL_S)
        snapshot = load(snapshot.directory)
    return snapshot


def _ready_s(launched: Launched) -> float:
    """How long the run gives itself: the time in a queue, and the time from there."""
    job = read_job(launched.directory)
    timeouts, slurm = job.get("timeouts", {}), job.get("slurm", {})
    queue_s = values.number(slurm.get("queue_s")) if slurm.get("nodes") else 0.0
    return (values.number(timeouts.get("ready_s")) or 300.0) + (queue_s or 0.0)


def waiting_for(snapshot: Snapshot) -> str:
    """Whom the run waits for, and what they are doing."""
    said = facts.text(snapshot.run.get("waiting"))
    if said:
        return said
    starting = [row for row in snapshot.daemons if row.get("state") == "starting"]
    return ", ".join(f"{row['name']} ({facts.doing(row, snapshot.now)})" for row in starting[:4])


def failed(launched: Launched, what: str) -> JobFailed:
    """End what is left, and say who failed and what it said last."""
    _record_death(launched)
    snapshot = stop.settle(load(launched.directory))
    return JobFailed(
        f"{snapshot.run_id} {what}: {snapshot.reason or snapshot.state}{quoted(snapshot)}",
        where=str(snapshot.directory),
        hint=hints.either(
            next_step.command(snapshot) if is_poisoned(snapshot.reason) else "",
            f"dlctl logs --failed -j {snapshot.run_id}",
            f"dlctl events -j {snapshot.run_id}",
            _doctor(snapshot),
        ),
    )


def _doctor(snapshot: Snapshot) -> str:
    """Where other hosts take part, what is wrong is often there, or on the way."""
    return f"dlctl doctor {next_step.job_file(snapshot)}" if other_hosts.of(snapshot) else ""


def _record_death(launched: Launched) -> None:
    """A coordinator that died before it could write anything leaves the last word to us."""
    with closing(RunDb(launched.directory)) as db:
        if launched.process is None or db.run().get("state") in ENDED:
            return
        with suppress(subprocess.TimeoutExpired):
            # The kernel shows a process as ended a moment before it says how.
            how = values.exit_in_words(launched.process.wait(DEATH_S))
            db.put_end("failed", f"the coordinator died while it started: {how}", time.time())
            db.commit()


def quoted(snapshot: Snapshot) -> str:
    """The last lines of the daemon that failed, to be put behind an error message.

    A coordinator that lived to the end has already said why, in the run's reason. What stands there
    is not said again.
    """
    name, said = last_words(snapshot)
    words = [line for line in said if not _is_known(line, snapshot.reason)]
    if name == "coordinator" and not snapshot.reason.startswith("the coordinator "):
        return ""
    shown = "".join(f"\n    {line}" for line in words[-LAST_LINES:])
    return f"\n  last lines of {name}:{shown}" if words else ""


def _is_known(line: str, reason: str) -> bool:
    """Whether a line of a log says nothing new: that a daemon began, or why the run has ended."""
    text = line.partition(" ")[2] if line.startswith(("ERROR ", "WARNING ")) else line
    return is_birth(line) or (not line.startswith(" ") and text.strip() in reason)


def last_words(snapshot: Snapshot) -> tuple[str, list[str]]:
    """(daemon, its last lines): the one that failed first, else the coordinator."""
    ended = [row for row in snapshot.daemons if _exit_at(row) is not None and _has_failed(row)]
    for row in sorted(ended, key=lambda row: (not row.get("error"), _exit_at(row) or 0.0)):
        words = row["last_exit"].get("last_lines") or logs.last_words(
            snapshot.directory, row["name"], LAST_LINES
        )
        return row["name"], [str(word) for word in words]
    return "coordinator", logs.last_words(snapshot.directory, "coordinator", LAST_LINES)


def _exit_at(row: dict[str, Any]) -> float | None:
    last = row.get("last_exit")
    return values.number(last.get("at")) if isinstance(last, dict) else None


def _has_failed(row: dict[str, Any]) -> bool:
    return bool(row["last_exit"].get("code"))


def ready_line(snapshot: Snapshot, took_s: float) -> str:
    return escape(
        f"{snapshot.run_id} is {snapshot.state} after {values.duration(took_s)}: "
        f"{len(snapshot.daemons)} daemons"
    )
