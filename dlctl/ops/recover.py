"""Recovering a run: with all of its coordinator's state, or from its newest good checkpoint."""

from __future__ import annotations

import time
from typing import Any

from dlctl.errors import DlctlError
from dlctl.ops import cases, other_hosts, remains, run_directory, stop
from dlctl.ops.cases import Case
from dlctl.ops.decide import Action
from dlctl.ops.remains import Findings
from dlctl.ops.run_directory import Launched
from dlctl.runs import lock
from dlctl.runs.snapshot import ENDED, Snapshot, load
from dlctl.util import notes

POLL_S = 0.1
LED_S = 5.0
"""For an agent to restart its coordinator, and for that to put itself on record."""
OVER_S = 60.0
"""For a coordinator to terminate the daemons of its run, including those on unreachable hosts."""
NOTE_AFTER_S = 1.0
Json = dict[str, Any]


def perform(case: Case) -> Launched | None:
    """Perform the action of `dlctl recover`; None if there is nothing to do. Raises DlctlError if
    it is refused, the directory cannot be written or the process cannot be started.
    """
    if refusal := cases.refusal(case):
        raise refusal
    if case.action is Action.GO_ON and case.findings is not None:
        return go_on(case.findings)
    if case.action is Action.RESUME:
        return _resume(case)
    return None


def go_on(findings: Findings) -> Launched:
    """Start the next coordinator of a resumable run; it finds everything else on its own."""
    snapshot = findings.snapshot
    lock.refuse_unknown_coordinator(snapshot)
    if remains.has_coordinator(snapshot):  # Its agent has started one that is not on record yet.
        return Launched(snapshot.directory, None, resumes=True)
    memory = remains.read_memory(snapshot.directory)
    state, _, released = memory["run"]
    is_ending = state == "stopping" and "end" in memory
    row: Json = {
        "state": "stopping" if is_ending else "starting" if released is None else "running",
        "recovery": _seen(findings),
        "reason": "",
        "waiting": "",
        "ended_at": None,
        "ready_at": None,
    }
    if not findings.living:
        row["control"] = None  # No daemon uses the old address; another process may have it by now.
    return run_directory.relaunch(snapshot, row)


def _seen(findings: Findings) -> dict[str, list[str]]:
    """The findings passed to the next coordinator: see `persistence.corrected`."""
    hosts = other_hosts.of(findings.snapshot)
    return {
        "served": [shard.name for shard in findings.shards if shard.path and shard.version],
        "gone": [name for name in hosts if name not in (*findings.living, *findings.away)],
    }


def _resume(case: Case) -> Launched:
    """Restart the run from its checkpoint with an unchanged job; terminates its live daemons."""
    run = case.run
    assert run is not None
    assert case.checkpoint is not None
    lock.refuse_unknown_coordinator(run)
    if remains.has_coordinator(run):
        raise DlctlError(
            f"a coordinator of {run.run_id} is running (pid {run.run['pid']})",
            where=str(run.directory),
            hint=f"dlctl status -j {run.run_id}",
        )
    cost = remains.because(case.loss, case.reasons)
    stop.clean_up(run, 0.0)
    job = remains.read_jobfile(run.directory)
    job_file, checkpoint = str(run.run.get("job_file") or ""), case.checkpoint[0]
    row = run_directory.first_row(run.directory, job_file, job, checkpoint)
    row["settings"] = {}  # A live setting may be the reason for the rollback.
    return run_directory.resume(run, row, checkpoint, cost, {})


def wait_led(snapshot: Snapshot) -> Snapshot:
    """Give a coordinator that was started or is about to be started a moment to put itself on
    record; returns the run's state then.
    """
    deadline = time.monotonic() + LED_S
    while _is_led_soon(snapshot) and time.monotonic() <= deadline:
        time.sleep(POLL_S)
        snapshot = load(snapshot.directory)
    return snapshot


def _is_led_soon(snapshot: Snapshot) -> bool:
    """By a coordinator that its agent starts, or started at the moment both were killed."""
    is_supervised = snapshot.is_live and not remains.is_led(snapshot)
    return is_supervised or lock.has_unknown_coordinator(snapshot)


def wait_over(snapshot: Snapshot) -> Snapshot:
    """Give the coordinator of an ended run time to exit; returns the run's state then. Until it
    exits it owns the run, and would overwrite later records with its own end.

    Raises DlctlError if it does not exit.
    """
    began, is_noted = time.monotonic(), False
    while snapshot.state in ENDED and (pid := snapshot.coordinator_pid) is not None:
        waited_s = time.monotonic() - began
        if waited_s > OVER_S:
            raise DlctlError(
                f"{snapshot.run_id} has {snapshot.state}, but its coordinator (pid {pid}) has not "
                "exited",
                hint=f"dlctl stop --kill -j {snapshot.run_id}",
            )
        if waited_s > NOTE_AFTER_S and not is_noted:
            is_noted = True
            name = snapshot.run_id
            notes.note(f"waiting for the coordinator of {name} to exit (pid {pid})")
        time.sleep(POLL_S)
        snapshot = load(snapshot.directory)
    return snapshot
