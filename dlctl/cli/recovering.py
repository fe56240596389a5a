"""Bringing a run back: with all that its coordinator knew, or from its newest good checkpoint."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

from dlctl import runs
from dlctl.cli import live, recovery, report, stop, values
from dlctl.cli.launching import Launched, explained, resume_keys, start_coordinator
from dlctl.cli.recovery import Findings
from dlctl.cli.snapshot import ENDED, Snapshot, load, read_job
from dlctl.errors import TimedOut
from dlctl.rundb import RunDb

POLL_S = 0.1
SUPERVISED_S = 5.0
"""For an agent to start its coordinator again; then we do."""
MARGIN_S = 30.0
WELL = ("running", "slow", "quarantined")
"""States of a daemon that nobody has to wait for."""
Json = dict[str, Any]


def go_on(findings: Findings) -> Launched:
    """Start the next coordinator of a run that can go on; it finds all the rest by itself.

    Raises DlctlError if the directory cannot be written or the process not be started.
    """
    snapshot = findings.snapshot
    directory = snapshot.directory
    memory = recovery.read_memory(directory)
    state, _, released = memory["run"]
    going = "running" if released is not None else "starting"
    keys: Json = {"reason": "", "waiting": "", "ended_at": None, "ready_at": None}
    keys["state"] = "stopping" if state == "stopping" and "end" in memory else going
    if not findings.living:
        keys["control"] = None  # Nobody knows the old address, which may be somebody else's by now.
    with explained(directory):
        with closing(RunDb(directory)) as db:
            db.put_run(**keys)
            db.put_memory(_brought_back(memory))
            db.commit()
        runs.socket_address(directory.name, "coordinator")
        runs.register(directory)
        try:
            return Launched(directory, start_coordinator(directory), goes_on=True)
        except BaseException:
            before = {key: snapshot.run.get(key) for key in keys}
            with closing(RunDb(directory)) as db:
                db.put_run(**before)
                db.commit()
            raise


def _brought_back(memory: Json) -> Json:
    """Quarantined workers, if there are no others: without any the run would stand still."""
    workers = {
        key: value
        for key, value in memory.items()
        if key.startswith("daemon/") and value.get("role") == "worker"
    }
    if any(value.get("state") != "quarantined" for value in workers.values()):
        return {}
    return {key: {**value, "state": "stopped"} for key, value in workers.items()}


def resume(findings: Findings) -> Launched:
    """Start the run again from the checkpoint that was found. What is still there is ended first.

    Raises DlctlError if the directory cannot be written or the process not be started.
    """
    from dlctl import states

    assert findings.checkpoint is not None
    snapshot = findings.snapshot
    directory = snapshot.directory
    job = recovery.read_jobfile(directory)
    stop.clean_up(snapshot, 0.0)
    keys = resume_keys(snapshot, str(findings.checkpoint[0]))
    with explained(directory):
        with closing(RunDb(directory)) as db:
            db.put_run(**keys)
            db.clear_memory()
            db.commit()
        states.remove(directory, job.servers)
        runs.socket_address(directory.name, "coordinator")
        runs.register(directory)
        return Launched(directory, start_coordinator(directory))


def wait_supervised(snapshot: Snapshot) -> Snapshot:
    """Give the agent a moment to start its coordinator; returns the run as it is then."""
    deadline = time.monotonic() + SUPERVISED_S
    while snapshot.is_live and not recovery.has_coordinator(snapshot):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
        snapshot = load(snapshot.directory)
    return snapshot


# ---------------------------------------------------------------- until it is back


def is_back(snapshot: Snapshot) -> bool:
    """Whether a run that goes on has all its daemons at work again, or has come to its end."""
    if snapshot.state in ENDED:
        return True
    heard = snapshot.run.get("updated_by") == snapshot.run.get("pid_start")
    is_starting = snapshot.run.get("state") in ("starting", "stopping")
    if not heard or is_starting or not recovery.has_coordinator(snapshot):
        return False
    return all(row.get("state") in WELL for row in snapshot.daemons)


def wait_back(launched: Launched, timeout_s: float | None, progress: live.Progress) -> Snapshot:
    """Wait until a run that goes on is at work again.

    Raises JobFailed with its last words if it fails; TimedOut if it takes longer than `timeout_s`
    (None: than the job gives its daemons to become ready).
    """
    from dlctl.cli import starting

    limit_s = timeout_s if timeout_s is not None else _ready_s(launched) + MARGIN_S
    began = time.monotonic()
    while True:
        snapshot = load(launched.directory)
        if snapshot.state == "failed":
            raise starting.failed(launched, "could not be brought back")
        if is_back(snapshot):
            return snapshot
        waited_s = time.monotonic() - began
        late = whom(snapshot)
        if waited_s > limit_s:
            raise TimedOut(
                f"{snapshot.run_id} is not back at work after {values.duration(limit_s)}; it waits "
                f"for {late or 'its coordinator'}",
                hint=f"dlctl why -j {snapshot.run_id}",
            )
        progress.phase("recovering", late, waited_s)
        time.sleep(POLL_S)


def whom(snapshot: Snapshot) -> str:
    """The daemons that are not at work yet, and what they are doing."""
    late = [row for row in snapshot.daemons if row.get("state") not in WELL]
    return ", ".join(f"{row['name']} ({report.doing(row, snapshot.now)})" for row in late[:4])


def _ready_s(launched: Launched) -> float:
    timeouts = read_job(launched.directory).get("timeouts", {})
    return values.number(timeouts.get("ready_s")) or 300.0
