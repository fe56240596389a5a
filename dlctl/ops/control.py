"""Requests to a live run (other daemons, a checkpoint), and waiting until it has done them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, JobFailed, NotRunning, Partial, TimedOut
from dlctl.ops import next_step, other_hosts
from dlctl.runs import facts
from dlctl.runs.snapshot import ENDED, GONE, Snapshot, load, read_job
from dlctl.util import hints, notes, values
from dlctl.util.text import escape

POLL_S = 0.1
ASK_S = 30.0
AT_WORK = ("running", "slow")
NAMED_MAX = 4
Row = Mapping[str, Any]


def require_live(snapshot: Snapshot, what: str) -> None:
    """Raises DlctlError, with the run's next step as the hint, unless it is live."""
    if not snapshot.is_live:
        raise DlctlError(
            f"{snapshot.run_id} is {snapshot.state}: it can be {what} while it runs",
            hint=next_step.command(snapshot),
        )


def ask(
    snapshot: Snapshot,
    verb: str,
    arguments: dict[str, Any],
    limit_s: float = ASK_S,
    tell: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """The coordinator's answer. Raises as `client.ask` does, with a next command."""
    from dlctl.control import client

    try:
        result = client.ask(snapshot.directory, verb, arguments, limit_s, tell)
    except DlctlError as error:
        error.hint = error.hint or f"dlctl status -j {snapshot.run_id}"
        raise
    warn_unwritten(result)
    return result


def save(snapshot: Snapshot, limit_s: float, tell: Callable[[Any], None]) -> dict[str, Any]:
    """Request a checkpoint; returns its row when it is complete. Raises as `ask` does."""
    require_live(snapshot, "saved")
    row = ask(snapshot, "checkpoint", {}, limit_s, tell)
    if row.get("error"):
        raise DlctlError(
            f"the checkpoint failed: {row['error']}",
            where=row.get("path"),
            hint=f"dlctl logs coordinator -l warning -j {snapshot.run_id}",
        )
    return row | {"at": time.time()}  # The coordinator's own clock is monotonic.


def awaited(snapshot: Snapshot, is_pending: Callable[[Snapshot], bool], limit_s: float) -> Snapshot:
    """Reload the run while `is_pending`, for at most `limit_s`; returns its state then."""
    deadline = time.monotonic() + limit_s
    while is_pending(snapshot) and time.monotonic() <= deadline:
        time.sleep(POLL_S)
        snapshot = load(snapshot.directory)
    return snapshot


def until(
    directory: Path,
    waiting: Callable[[Snapshot], str | None],
    limit_s: float,
    what: str,
    progress: notes.Phases,
    state: str = "",
) -> Snapshot:
    """Poll until `waiting` returns None; otherwise it names what the run still waits for. Returns
    the run's state then. Raises TimedOut after `limit_s`: `what` is the start of its text. `state`
    is shown instead of the run's.
    """
    began = time.monotonic()
    while True:
        snapshot = load(directory)
        pending = waiting(snapshot)
        if pending is None:
            return snapshot
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            text = f"{what} after {values.duration(limit_s)}; it waits for {pending}"
            raise TimedOut(text, hint=f"dlctl why -j {snapshot.run_id}")
        progress.phase(state or snapshot.state, pending, waited_s)
        time.sleep(POLL_S)


def wait(
    snapshot: Snapshot,
    names: Iterable[str],
    limit_s: float | None,
    what: str,
    progress: notes.Phases,
    leaving: Iterable[str] = (),
) -> Snapshot:
    """Wait until the next incarnations of these daemons are running, and those that are `leaving`
    are gone. `snapshot`: from before the request. Returns the run's state then.

    Raises TimedOut after `limit_s` (None: the time that a start may take), Partial if a daemon it
    waits for will never be ready, JobFailed or NotRunning if the run ends meanwhile.
    """
    limit_s = limit_s if limit_s is not None else start_limit_s(snapshot.directory)
    before = {name: facts.incarnation(snapshot.daemon(name)) for name in names}

    def waiting(now: Snapshot) -> str | None:
        rows = [now.daemon(name) for name in leaving]
        late = [*_not_at_work(now, before), *(describe(row, now.now) for row in rows if row)]
        if late:
            _require_hope(now, what, len(late), before)
        return ", ".join(late[:NAMED_MAX]) or None

    return until(snapshot.directory, waiting, limit_s, f"not yet {what}", progress)


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
    """How long a start may take before its coordinator gives up: the wait for hosts, the time to be
    ready, and a grace period to terminate what is left.
    """
    job = read_job(directory)
    timeouts = job.get("timeouts", {})
    ready_s, grace_s = (values.number(timeouts.get(key)) for key in ("ready_s", "grace_s"))
    return other_hosts.wait_s(job) + (ready_s or 300.0) + (grace_s or 30.0)


def _not_at_work(snapshot: Snapshot, before: Mapping[str, int]) -> list[str]:
    late = []
    for name, old in before.items():
        row = snapshot.daemon(name)
        if not row:
            late.append(f"{name} (not started yet)")
        elif facts.incarnation(row) <= old or row.get("state") not in AT_WORK:
            late.append(describe(row, snapshot.now))
    return late


def describe(row: Row, now: float) -> str:
    """As in "worker-3 (importing torch)"; for a hung worker, with the time of its kill if known."""
    name, state = escape(str(row["name"])), row.get("state")
    if state in ("stopped", "failed", "unknown", GONE):
        return f"{name} (gone)"
    if state == "backoff":
        return f"{name} (being restarted)"
    kill_at = values.number(row.get("kill_at")) if "stuck_s" in facts.metrics(row) else None
    then = "" if kill_at is None else f"; it is killed in {max(0.0, kill_at - now):.0f} s"
    doing = "no heartbeat yet" if state in AT_WORK else escape(str(state))
    return f"{name} ({facts.text(row.get('phase')) or doing}{then})"


def warn_unwritten(result: Mapping[str, Any]) -> None:
    """Warn if the coordinator accepted a request but could not persist it."""
    if why := result.get("unwritten"):
        notes.warn(
            f"the run's database cannot be written ({why!s}): if the coordinator dies before there "
            "is room, this request is lost and has to be repeated"
        )
