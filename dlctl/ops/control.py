"""Requesting other daemons from a live run, and waiting until they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, JobFailed, NotRunning, Partial, TimedOut
from dlctl.runs import facts
from dlctl.runs.snapshot import ENDED, GONE, Snapshot, load, read_job
from dlctl.util import hints, notes, processes, values
from dlctl.util.names import COORDINATOR
from dlctl.util.text import escape

POLL_S = 0.1
ASK_S = 30.0
AT_WORK = ("running", "slow")
NAMED_MAX = 4
Row = Mapping[str, Any]
Goal = Callable[[Snapshot], list[str]]
"""The daemons it still waits for, and what they are doing; [] when it is reached."""


def require_live(snapshot: Snapshot, what: str) -> None:
    """Raises DlctlError, with an alternative as the hint, unless the run is live."""
    if snapshot.is_live:
        return
    file = snapshot.run.get("job_file")
    again = f"dlctl start {values.path(file)}" if isinstance(file, str) else "dlctl start JOBFILE"
    raise DlctlError(
        f"{snapshot.run_id} is {snapshot.state}: it can be {what} while it runs",
        hint=f"dlctl recover -j {snapshot.run_id}" if snapshot.state == "failed" else again,
    )


def ask(
    snapshot: Snapshot, verb: str, arguments: dict[str, Any], limit_s: float = ASK_S
) -> dict[str, Any]:
    """The coordinator's answer. Raises as `client.ask` does, with a next command."""
    from dlctl.control import client

    try:
        result = client.ask(snapshot.directory, verb, arguments, limit_s)
    except DlctlError as error:
        error.hint = error.hint or f"dlctl status -j {snapshot.run_id}"
        raise
    warn_unwritten(result)
    return result


def until(
    directory: Path,
    waiting: Callable[[Snapshot], str | None],
    limit_s: float,
    late: Callable[[Snapshot, str], TimedOut],
    progress: notes.Phases,
    state: str = "",
) -> Snapshot:
    """Poll until `waiting` returns None; otherwise it names what the run still waits for. Returns
    the run's state then. After `limit_s` raises what `late` returns. `state` is shown instead of
    the run's.
    """
    began = time.monotonic()
    while True:
        snapshot = load(directory)
        pending = waiting(snapshot)
        if pending is None:
            return snapshot
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            raise late(snapshot, pending)
        progress.phase(state or snapshot.state, pending, waited_s)
        time.sleep(POLL_S)


def wait(
    snapshot: Snapshot,
    goal: Goal,
    limit_s: float | None,
    what: str,
    before: Mapping[str, int],
    progress: notes.Phases,
) -> Snapshot:
    """Wait until `goal` is reached; `what` names it. Returns the run's state then.

    `before`: name -> incarnation of each daemon to be restarted, before its restart. Raises
    TimedOut after `limit_s` (None: the time that a start may take), Partial if a daemon it waits
    for will never be ready, JobFailed or NotRunning if the run ends meanwhile.
    """
    limit_s = limit_s if limit_s is not None else start_limit_s(snapshot.directory)

    def waiting(snapshot: Snapshot) -> str | None:
        if not (names := goal(snapshot)):
            return None
        _require_hope(snapshot, what, len(names), before)
        return ", ".join(names[:NAMED_MAX])

    def late(snapshot: Snapshot, pending: str) -> TimedOut:
        text = f"not yet after {values.duration(limit_s)}: {what}; it waits for {pending}"
        return TimedOut(text, hint=f"dlctl why -j {snapshot.run_id}")

    return until(snapshot.directory, waiting, limit_s, late, progress)


def _require_hope(snapshot: Snapshot, what: str, late: int, before: Mapping[str, int]) -> None:
    if snapshot.state in ENDED:
        raise not_reached(snapshot, what)
    lost = (row for row in snapshot.daemons if row.get("state") == "quarantined")
    new = [row["name"] for row in lost if facts.incarnation(row) > before.get(row["name"], 2**63)]
    if new and len(new) == late:
        raise Partial(
            f"{', '.join(new)} cannot be used (quarantined); not reached: {what}",
            hint=f"dlctl why -j {snapshot.run_id}",
        )


def not_reached(snapshot: Snapshot, what: str) -> DlctlError:
    """The error for a run that has ended before `what`."""
    kind = JobFailed if snapshot.state == "failed" else NotRunning
    why = f": {snapshot.reason}" if snapshot.reason else ""
    return kind(
        f"{snapshot.run_id} {facts.became(snapshot.state)}{why}; not reached: {what}",
        hint=hints.either(
            f"dlctl status -j {snapshot.run_id}", f"dlctl logs --failed -j {snapshot.run_id}"
        ),
    )


def start_limit_s(directory: Path) -> float:
    """How long a start may take before its coordinator gives up: the time in a queue, the time to
    be ready, and a grace period to terminate what is left.
    """
    job = read_job(directory)
    timeouts, slurm = job.get("timeouts", {}), job.get("slurm", {})
    queue_s = values.number(slurm.get("queue_s")) if slurm.get("nodes") else 0.0
    ready_s, grace_s = (values.number(timeouts.get(key)) for key in ("ready_s", "grace_s"))
    return (queue_s or 0.0) + (ready_s or 300.0) + (grace_s or 30.0)


def not_at_work(snapshot: Snapshot, before: Mapping[str, int]) -> list[str]:
    """Those of `before` (name -> incarnation then) whose next incarnation is not running yet."""
    rows = {row["name"]: row for row in snapshot.daemons}
    late = []
    for name, old in before.items():
        row = rows.get(name)
        if row is None:
            late.append(f"{name} (not started yet)")
        elif facts.incarnation(row) <= old or row.get("state") not in AT_WORK:
            late.append(told(row, snapshot.now))
    return late


def incarnations(snapshot: Snapshot, names: Iterable[str]) -> dict[str, int]:
    own = facts.incarnation(snapshot.run)
    return {
        name: own if name == COORDINATOR else facts.incarnation(snapshot.daemon(name))
        for name in names
    }


def restarted(before: Mapping[str, int]) -> Goal:
    """Until the next incarnations of these (see `incarnations`) are running."""
    others = {name: number for name, number in before.items() if name != COORDINATOR}

    def waiting(snapshot: Snapshot) -> list[str]:
        late = not_at_work(snapshot, others)
        if COORDINATOR in before and not _leads(snapshot, before[COORDINATOR]):
            late.append(f"{COORDINATOR} (starting)")
        return late

    return waiting


def _leads(snapshot: Snapshot, before: int) -> bool:
    """Whether a newer coordinator is running: it has written its state of the run."""
    run = snapshot.run
    return (
        facts.incarnation(run) > before
        and processes.is_alive(run.get("pid"), run.get("pid_start"))
        and run.get("updated_by") == run.get("pid_start")
    )


def told(row: Row, now: float) -> str:
    """As in "worker-3 (importing torch)"; for a hung worker, with the time of its kill if known."""
    name, state = escape(str(row["name"])), row.get("state")
    if state in ("stopped", "failed", "unknown", GONE):
        return f"{name} (gone)"
    if state == "backoff":
        return f"{name} (being restarted)"
    kill_at = values.number(row.get("kill_at")) if "stuck_s" in facts.metrics(row) else None
    then = "" if kill_at is None else f"; it is killed in {max(0.0, kill_at - now):.0f} s"
    return f"{name} ({facts.text(row.get('phase')) or _state_text(state)}{then})"


def _state_text(state: Any) -> str:
    return "no heartbeat yet" if state in AT_WORK else escape(str(state))


# ---------------------------------------------------------------- unpersisted requests
# The coordinator accepted a request but could not persist it.


def warn_unwritten(result: Mapping[str, Any]) -> None:
    """Warn if the answer says so: the user may have to repeat the request."""
    why = result.get("unwritten")
    if why:
        notes.warn(
            f"the run's database cannot be written ({why!s}): if the coordinator dies before there "
            "is room, this request is lost and has to be repeated"
        )
