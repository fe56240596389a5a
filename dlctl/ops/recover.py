"""Recovering a run: with all of its coordinator's state, or from its newest good checkpoint."""

from __future__ import annotations

from typing import Any

from dlctl.errors import DlctlError
from dlctl.ops import control, other_hosts, remains, run_directory, stop
from dlctl.ops.cases import Case
from dlctl.ops.decide import Action
from dlctl.ops.remains import Findings
from dlctl.ops.run_directory import Launched
from dlctl.runs import lock
from dlctl.runs.snapshot import ENDED, Snapshot
from dlctl.util import notes

LED_S = 5.0
"""For an agent to restart its coordinator, and for that to put itself on record."""
OVER_S = 60.0
"""For a coordinator to terminate the daemons of its run, including those on unreachable hosts."""
NOTE_AFTER_S = 1.0
Json = dict[str, Any]


def perform(case: Case) -> Launched | None:
    """Perform the action of `dlctl recover`; None if there is nothing to do. Raises DlctlError if
    the directory cannot be written or the process cannot be started.
    """
    if case.action is Action.GO_ON and case.findings is not None:
        return go_on(case.findings)
    if case.action is Action.RESUME:
        return _resume(case)
    return None


def go_on(findings: Findings) -> Launched:
    """Start the next coordinator of a resumable run; it finds everything else on its own."""
    snapshot, hosts = findings.snapshot, other_hosts.of(findings.snapshot)
    lock.refuse_unknown_coordinator(snapshot)
    if snapshot.coordinator_pid is not None:  # Its agent has started one, not on record yet.
        return Launched(snapshot.directory, None, resumes=True)
    memory = remains.read_memory(snapshot.directory)
    state, _, released = memory["run"]
    is_ending = state == "stopping" and "end" in memory
    row: Json = {
        "state": "stopping" if is_ending else "starting" if released is None else "running",
        # For the next coordinator: see `persistence.corrected`.
        "recovery": {
            "served": [shard.name for shard in findings.shards if shard.path and shard.version],
            "gone": [name for name in hosts if name not in (*findings.living, *findings.away)],
        },
        "reason": "",
        "waiting": "",
        "ended_at": None,
        "ready_at": None,
    }
    if not findings.living:
        row["control"] = None  # No daemon uses the old address; another process may have it by now.
    return run_directory.relaunch(snapshot, row)


def _resume(case: Case) -> Launched:
    """Restart the run from its checkpoint with an unchanged job; terminates its live daemons."""
    run = case.run
    assert run is not None
    assert case.checkpoint is not None
    lock.refuse_unknown_coordinator(run)
    if run.coordinator_pid is not None:
        raise DlctlError(
            f"a coordinator of {run.run_id} is running (pid {run.coordinator_pid})",
            where=str(run.directory),
            hint=f"dlctl status -j {run.run_id}",
        )
    cost = case.cost
    stop.clean_up(run, 0.0)
    job, job_file = remains.read_jobfile(run.directory), str(run.run.get("job_file") or "")
    row = run_directory.first_row(run.directory, job_file, job, case.checkpoint[0])
    row["settings"] = {}  # A live setting may be the reason for the rollback.
    return run_directory.resume(run, row, case.checkpoint[0], cost, {})


def wait_led(snapshot: Snapshot) -> Snapshot:
    """Give a coordinator that an agent starts, or that was started at the moment both were killed,
    a moment to put itself on record; returns the run's state then.
    """

    def is_led_soon(now: Snapshot) -> bool:
        return (now.is_live and not remains.is_led(now)) or lock.has_unknown_coordinator(now)

    return control.awaited(snapshot, is_led_soon, LED_S)


def wait_over(snapshot: Snapshot) -> Snapshot:
    """Give the coordinator of an ended run time to exit; returns the run's state then. Until it
    exits it owns the run, and would overwrite later records with its own end.

    Raises DlctlError if it does not exit.
    """

    def is_exiting(now: Snapshot) -> bool:
        return now.state in ENDED and now.coordinator_pid is not None

    snapshot = control.awaited(snapshot, is_exiting, NOTE_AFTER_S)
    of_run = f"the coordinator of {snapshot.run_id} to exit (pid {snapshot.coordinator_pid})"
    if is_exiting(snapshot):
        notes.note(f"waiting for {of_run}")
        snapshot = control.awaited(snapshot, is_exiting, OVER_S)
    if is_exiting(snapshot):
        hint = f"dlctl stop --kill -j {snapshot.run_id}"
        raise DlctlError(f"waited in vain for {of_run}", hint=hint)
    return snapshot
