"""Waiting until a run is ready: which daemons it waits for, and why it failed if it did."""

from __future__ import annotations

import subprocess
import time
from contextlib import closing, suppress
from typing import Any

from dlctl.errors import JobFailed
from dlctl.ops import control, next_step, other_hosts, stop
from dlctl.ops.recover import Launched
from dlctl.runs import facts, logs
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import ENDED, READY, Snapshot, load
from dlctl.util import hints, notes, values
from dlctl.util.names import COORDINATOR
from dlctl.util.text import is_first_line, is_poisoned

LAST_LINES = 12
DEATH_S = 2.0


def wait_ready(launched: Launched, timeout_s: float | None, progress: notes.Phases) -> Snapshot:
    """Wait until all daemons of a started or recovered run are ready. By then the run may have
    ended; if it is already stopping, this waits for its end.

    Raises JobFailed with the last lines of the daemon that failed, when no process is left running;
    TimedOut if `timeout_s` has passed first: the run then continues to start.
    """
    limit_s = timeout_s if timeout_s is not None else control.start_limit_s(launched.directory)

    def waiting(snapshot: Snapshot) -> str | None:
        was_ready = snapshot.run.get("ready_at") is not None and snapshot.state != "stopping"
        is_ready = was_ready or snapshot.state in (*READY, "finished")
        if is_back(snapshot) if launched.resumes else is_ready:
            return None
        if not snapshot.is_live:
            what = "could not be recovered" if launched.resumes else "did not start"
            raise failed(launched, what)
        return waiting_for(snapshot)

    state = "recovering" if launched.resumes else ""
    what = f"{launched.directory.name} is not ready but still starting"
    return control.until(launched.directory, waiting, limit_s, what, progress, state)


def is_back(snapshot: Snapshot) -> bool:
    """Whether all daemons of a resumed run are running again, or it has ended without failing."""
    if snapshot.state in ENDED:
        return snapshot.state != "failed"
    is_starting = snapshot.run.get("state") in ("starting", "stopping")
    is_led = snapshot.coordinator["state"] == "running"
    return is_led and not is_starting and not _late(snapshot)


def waiting_for(snapshot: Snapshot) -> str:
    """The daemons that the run waits for and that wait for no other, and what they are doing."""
    if snapshot.coordinator["state"] != "running":
        return control.describe(snapshot.coordinator, snapshot.now)
    if waiting := facts.text(snapshot.run.get("waiting")):
        return waiting
    late = _late(snapshot)
    causes = [row for row in late if not row.get("waiting_for")] or late
    return ", ".join(control.describe(row, snapshot.now) for row in causes[: control.NAMED_MAX])


def _late(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The daemons that are not running yet. A new coordinator inherits the state "running" from its
    predecessor; a daemon counts as running once it has reported to the new one.
    """
    return [
        row
        for row in snapshot.daemons
        if row.get("state") != "quarantined"
        and not (row.get("state") in control.AT_WORK and (row.get("phase") or facts.metrics(row)))
    ]


def failed(launched: Launched, what: str) -> JobFailed:
    """Terminate what is left; returns an error with the failed daemon and its last lines."""
    _record_death(launched)
    snapshot = stop.settle(load(launched.directory))
    # With other hosts, the cause is often there or in the network.
    doctor = f"dlctl doctor {next_step.job_file(snapshot)}" if other_hosts.can_ask(snapshot) else ""
    return JobFailed(
        f"{snapshot.run_id} {what}: {snapshot.reason or snapshot.state}{quoted(snapshot)}",
        where=str(snapshot.directory),
        hint=hints.either(
            next_step.command(snapshot) if is_poisoned(snapshot.reason) else "",
            f"dlctl logs --failed -j {snapshot.run_id}",
            doctor,
        ),
    )


def _record_death(launched: Launched) -> None:
    """Record the failure of a coordinator that died before it could write anything."""
    with closing(RunDb(launched.directory)) as db:
        if launched.process is None or db.run().get("state") in ENDED:
            return
        with suppress(subprocess.TimeoutExpired):
            # The kernel shows a process as ended a moment before its exit status is available.
            how = values.exit_in_words(launched.process.wait(DEATH_S))
            db.put_end("failed", f"the coordinator died while it started: {how}", time.time())
            db.commit()


def quoted(snapshot: Snapshot) -> str:
    """The last lines of the daemon that failed first, to append to an error message, without lines
    that the run's reason already has.
    """
    ended = [(row, row.get("last_exit") or {}) for row in snapshot.daemons]
    ended = [(row, last) for row, last in ended if last.get("code")]
    ended.sort(key=lambda pair: (not pair[0].get("error"), pair[1].get("at") or 0.0))
    if not ended and not snapshot.reason.startswith("the coordinator "):
        return ""  # The coordinator survived and has recorded the reason.
    row, last = ended[0] if ended else ({"name": COORDINATOR}, {})
    name, recorded = str(row["name"]), last.get("last_lines")
    words = recorded or logs.last_log_lines(snapshot.directory, name, LAST_LINES)
    new = [str(line) for line in words if not _is_known(str(line), snapshot.reason)]
    if new and new[-1] != words[-1]:  # The exception below its traceback, though it is known.
        new.append(str(words[-1]))
    return "\n    ".join([f"\n  last lines of {name}:", *new]) if new else ""


def _is_known(line: str, reason: str) -> bool:
    """Whether a log line adds nothing: the start of a daemon, or the reason of the run's end."""
    text = line.partition(" ")[2] if line.startswith(("ERROR ", "WARNING ")) else line
    return is_first_line(line) or (not line.startswith(" ") and text.strip() in reason)
