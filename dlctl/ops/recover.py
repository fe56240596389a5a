"""Bringing a run back: with all that its coordinator knew, or from its newest good checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from dlctl.errors import DlctlError, Unreachable
from dlctl.ops import control, next_step, other_hosts, remains, stop
from dlctl.ops.remains import Findings
from dlctl.ops.run_directory import (
    Launched,
    explained,
    give_up_shards,
    resume_keys,
    start_coordinator,
)
from dlctl.runs import lineage, lock, logs, paths
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import ENDED, Snapshot, load
from dlctl.util import hints, notes, values
from dlctl.util.names import COORDINATOR

POLL_S = 0.1
LED_S = 5.0
"""For an agent to start its coordinator again, and for that to write down who it is."""
OVER_S = 60.0
"""For a coordinator to end the daemons of its run, on hosts that are away, too."""
TOLD_S = 1.0
WELL = ("running", "slow")
Json = dict[str, Any]


def go_on(findings: Findings) -> Launched:
    """Start the next coordinator of a run that can go on; it finds all the rest by itself.

    Raises DlctlError if the directory cannot be written or the process not be started.
    """
    snapshot = findings.snapshot
    lock.refuse_unknown_coordinator(snapshot)
    directory = snapshot.directory
    if remains.has_coordinator(snapshot):  # Its agent has started one, which has yet to say so.
        return Launched(directory, None, goes_on=True)
    memory = remains.read_memory(directory)
    state, _, released = memory["run"]
    going = "running" if released is not None else "starting"
    keys: Json = {"reason": "", "waiting": "", "ended_at": None, "ready_at": None}
    keys["recovery"] = _seen(findings)
    keys["state"] = "stopping" if state == "stopping" and "end" in memory else going
    if not findings.living:
        keys["control"] = None  # Nobody knows the old address, which may be somebody else's by now.
    with explained(directory):
        with closing(RunDb(directory)) as db:
            db.put_run(**keys)
            db.commit()
        paths.socket_address(directory.name, "coordinator")
        paths.register(directory)
        try:
            return Launched(directory, start_coordinator(directory), goes_on=True)
        except BaseException:
            before = {key: snapshot.run.get(key) for key in keys}
            with closing(RunDb(directory)) as db:
                db.put_run(**before)
                db.commit()
            raise


def _seen(findings: Findings) -> dict[str, list[str]]:
    """What the next coordinator is to know: see `dlctl.roles.coordinator.recovered`."""
    hosts = other_hosts.of(findings.snapshot)
    return {
        "served": [shard.name for shard in findings.shards if shard.path and shard.version],
        "gone": [name for name in hosts if name not in (*findings.living, *findings.away)],
    }


def resume(findings: Findings, why: str = "") -> Launched:
    """Start the run again from the checkpoint that was found. What is still there is ended first.

    `why` goes into the run's events if nothing made it necessary.
    Raises DlctlError if the directory cannot be written or the process not be started.
    """
    assert findings.checkpoint is not None
    snapshot = findings.snapshot
    lock.refuse_unknown_coordinator(snapshot)
    if remains.has_coordinator(snapshot):
        raise DlctlError(
            f"a coordinator of {snapshot.run_id} is there (pid {snapshot.run['pid']})",
            where=str(snapshot.directory),
            hint=f"dlctl status -j {snapshot.run_id}",
        )
    directory = snapshot.directory
    cost = remains.cost(findings, why)
    stop.clean_up(snapshot, 0.0)
    keys = resume_keys(snapshot, str(findings.checkpoint[0]))
    with explained(directory):
        with closing(RunDb(directory)) as db:
            db.put_run(**keys)
            lineage.record(db, directory, findings.checkpoint[0], cost)
            db.clear_memory()
            db.commit()
        give_up_shards(snapshot)
        paths.socket_address(directory.name, "coordinator")
        paths.register(directory)
        return Launched(directory, start_coordinator(directory))


def wait_led(snapshot: Snapshot) -> Snapshot:
    """Give a coordinator that somebody has started, or is about to, a moment to be on record;
    returns the run as it is then.
    """
    deadline = time.monotonic() + LED_S
    while _is_led_soon(snapshot) and time.monotonic() <= deadline:
        time.sleep(POLL_S)
        snapshot = load(snapshot.directory)
    return snapshot


def wait_over(snapshot: Snapshot) -> Snapshot:
    """Give the coordinator of a run that has ended the time to leave; returns the run as it is
    then. It has the run until then, and would write its own end over what comes next.

    Raises DlctlError if it stays.
    """
    began, told = time.monotonic(), False
    while snapshot.state in ENDED and (pid := snapshot.coordinator_pid) is not None:
        waited_s = time.monotonic() - began
        if waited_s > OVER_S:
            raise DlctlError(
                f"{snapshot.run_id} has {snapshot.state}, but its coordinator (pid {pid}) is still "
                "there",
                hint=f"dlctl stop --kill -j {snapshot.run_id}",
            )
        if waited_s > TOLD_S and not told:
            told = True
            name = snapshot.run_id
            notes.note(f"waiting for the coordinator of {name} to leave (pid {pid})")
        time.sleep(POLL_S)
        snapshot = load(snapshot.directory)
    return snapshot


def _is_led_soon(snapshot: Snapshot) -> bool:
    """By what its agent starts, or has started in the moment in which both were killed."""
    is_supervised = snapshot.is_live and not remains.is_led(snapshot)
    return is_supervised or lock.has_unknown_coordinator(snapshot)


# ---------------------------------------------------------------- until it is back


def is_back(snapshot: Snapshot) -> bool:
    """Whether a run that goes on has all its daemons at work again, or has come to a good end."""
    if snapshot.state in ENDED:
        return snapshot.state != "failed"
    is_starting = snapshot.run.get("state") in ("starting", "stopping")
    return _has_spoken(snapshot) and not is_starting and not _late(snapshot)


def whom(snapshot: Snapshot) -> str:
    """Those who are not at work yet and wait for no other one, and what they are doing."""
    if not _has_spoken(snapshot):
        since = values.number(snapshot.run.get("updated_at"))
        failed = logs.ends_at_once(snapshot.directory, COORDINATOR, since)
        return f"coordinator (starting{f'; the one before: {failed}' if failed else ''})"
    late = _late(snapshot)
    causes = [row for row in late if not row.get("waiting_for")] or late
    return ", ".join(control.told(row, snapshot.now) for row in causes)


def _has_spoken(snapshot: Snapshot) -> bool:
    """Whether the new coordinator has written what is known of the others; not the one before."""
    heard = snapshot.run.get("updated_by") == snapshot.run.get("pid_start")
    return heard and remains.has_coordinator(snapshot)


def _late(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The daemons that are not at work yet.

    A coordinator takes over from the one before that they were running. Whether they are there, it
    knows when they have reported to itself.
    """
    return [row for row in snapshot.daemons if not _is_at_work(row)]


def _is_at_work(row: Mapping[str, Any]) -> bool:
    has_reported = bool(row.get("phase") or row.get("metrics"))
    return row.get("state") == "quarantined" or (row.get("state") in WELL and has_reported)


# ---------------------------------------------------------------- hosts that cannot be reached
# A run that has died while hosts of it cannot be reached: it waits for them, or does without.


def error_without_hosts(findings: Findings) -> Unreachable:
    """Nothing can be done as long as these hosts are away, but by the owner of the job file."""
    snapshot = findings.snapshot
    hosts = [host.ssh for name, host in other_hosts.of(snapshot).items() if name in findings.away]
    why = "\n".join(f"  {words}" for words in findings.away.values())
    names, are = " and ".join(hosts), "is" if len(hosts) == 1 else "are"
    return Unreachable(
        f"{snapshot.run_id} cannot go on without {names}:\n{why}",
        where=", ".join(hosts),
        hint=hints.either(
            hints.told(f"dlctl recover -j {snapshot.run_id}", f"when {names} {are} back"),
            hints.told(f"dlctl doctor {next_step.job_file(snapshot)}", "says what is wrong there"),
            next_step.without(snapshot, hosts),
        ),
    )
