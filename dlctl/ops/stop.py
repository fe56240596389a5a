"""Stopping a run, gracefully or at once, so that no process of it is left."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, Partial, TimedOut, Unreachable
from dlctl.ops import control, other_hosts
from dlctl.runs import database, paths, reach
from dlctl.runs.snapshot import Snapshot, load
from dlctl.util import notes, processes
from dlctl.util.text import KILLED, plural

Tell = Callable[[Mapping[str, Any]], None]
SAVE_S = 600.0
"""Time for the checkpoint, on top of the grace period."""


NO_REPLY_S = 3.0
"""How long --kill waits for the coordinator before it kills the processes itself."""
EXIT_S = 15.0
"""Time for the coordinator to exit after it has reported that all is done."""
LOST = "the coordinator died while the run was being stopped"


def stop(
    snapshot: Snapshot,
    *,
    checkpoint: bool,
    grace_s: float,
    kill: bool,
    origin: str = "command",
    tell: Tell | None = None,
) -> Snapshot:
    """Stop a live run and wait for its end; returns its final state.

    `origin`: the source of the request, see `STOPPED_BY` in `dlctl.roles.coordinator.shutdown`; it
    is part of the run's reason. `tell` is called with the coordinator's progress reports.
    Raises Unreachable, TimedOut, or Partial if processes are left that cannot be terminated.
    """
    from dlctl.control import client

    arguments = {
        "names": [],
        "checkpoint": checkpoint,
        "grace_s": grace_s,
        "kill": kill,
        "origin": origin,
    }
    limit_s = NO_REPLY_S if kill else grace_s + SAVE_S
    away: list[str] = []
    try:
        client.ask(snapshot.directory, "stop", arguments, limit_s, tell)
    except client.Gone:
        notes.note("the coordinator is gone; ending the processes it left behind")
        state, reason = ("stopped", KILLED) if kill else ("failed", LOST)
        _record_end(snapshot.directory, state, reason)
        _, away = end_left(load(snapshot.directory), grace_s, kill=kill)
    except (Unreachable, TimedOut) as error:
        if not kill:
            raise
        notes.warn(error.message)
        away = kill_all(snapshot)
    after = settle(snapshot, 0.0 if kill else EXIT_S)
    require_reached(after, away)
    return after


def end_left(snapshot: Snapshot, grace_s: float, *, kill: bool) -> tuple[list[str], list[str]]:
    """Terminate what is left of a run that is not live: (daemons terminated on this machine, hosts
    on which processes may still run). `kill`: at once, and shards on other hosts are discarded.
    """
    left_s = 0.0 if kill else grace_s
    ended, away = clean_up(snapshot, left_s), list[str]()
    # Of a run that has ended in order only the place of its next coordinator may be left.
    is_placed = reach.read(snapshot.directory) is not None
    if kill or is_placed or snapshot.state not in ("stopped", "finished"):
        away = other_hosts.end(snapshot, left_s, purge=kill)
    if kill and snapshot.is_gone:
        _record_end(snapshot.directory, "stopped", KILLED)
    return ended, away


def kill_all(snapshot: Snapshot) -> list[str]:
    """Kill all processes of a run at once, also if its database cannot be read; returns hosts on
    which processes may still run.

    An agent restarts a dead coordinator unless the run is over, so the end is recorded first; and
    once more, because a coordinator that was only slow may have overwritten it.
    """
    for _ in range(2):
        _record_end(snapshot.directory, "stopped", KILLED)
        clean_up(snapshot, 0.0, coordinator=True)
    return other_hosts.end(snapshot, 0.0, purge=True)


def require_reached(snapshot: Snapshot, away: list[str]) -> None:
    """Raises Partial if there are hosts on which processes may still run."""
    if away:
        hosts = f"{plural(len(away), 'host')}: {', '.join(away)}"
        raise Partial(
            f"{snapshot.run_id} has {snapshot.state}, but processes may still run on {hosts}",
            hint=f"when they can be reached again: dlctl stop --kill -j {snapshot.run_id}",
        )


def settle(snapshot: Snapshot, grace_s: float = EXIT_S) -> Snapshot:
    """Wait for the coordinator to exit and ensure that no process of the run is left."""
    now = load(snapshot.directory)
    now = control.awaited(now, lambda now: now.coordinator_pid is not None, EXIT_S)
    clean_up(now, grace_s, coordinator=True)
    after = load(snapshot.directory)
    if after.state in ("stopped", "finished"):
        remove_kept(after)
    return after


def clean_up(snapshot: Snapshot, grace_s: float, *, coordinator: bool = False) -> list[str]:
    """Terminate the processes of a run that are left on this machine; returns their names.
    `other_hosts` handles those on other hosts. coordinator: also the one on record, which exits on
    its own if the run has ended.
    """
    rows = [*(processes.living([snapshot.coordinator]) if coordinator else ()), *living(snapshot)]
    how = f"ending them (SIGTERM; SIGKILL only if they still run after {grace_s:g}s)"
    how = how if grace_s > 0 else "killing them (SIGKILL)"
    if rows:
        notes.note(f"still running: {', '.join(row['name'] for row in rows)}; {how}")
    ended, left = processes.end(rows, grace_s)
    if left:
        raise Partial(
            f"could not end {', '.join(left)} of {snapshot.run_id}",
            hint="ps -o pid,stat,cmd " + " ".join(str(r["pid"]) for r in rows if r["name"] in left),
        )
    if ended:
        notes.note(f"ended {', '.join(ended)}")
    paths.remove_sockets(snapshot.run_id)
    return ended


def living(snapshot: Snapshot) -> list[Mapping[str, Any]]:
    """The processes of a run on this machine, on record or not, without the coordinator on record.
    They are identified by their command lines and the run's records, never by a pid alone.
    """
    from dlctl.launch import local

    known = processes.living(snapshot.daemons)
    pids = {row["pid"] for row in known} | {snapshot.coordinator_pid}
    others = [found.row() for found in local.living(snapshot.directory) if found.pid not in pids]
    return [*known, *others]


def _record_end(directory: Path, state: str, reason: str) -> None:
    """Record that the run is over: in this state, for this reason, without any daemon.

    From then on no agent restarts its coordinator. A run that has just ended by itself keeps its
    end. If the database cannot be written (a frozen
    coordinator has it locked, the disk is full, a page is damaged), it warns and leaves it as is.
    """
    try:
        with closing(database.RunDb(directory)) as db:
            if db.run().get("state") not in (state, "finished", "stopped"):
                db.put_end(state, reason, time.time())
            for row in db.daemons():
                if not processes.is_alive(row.get("pid"), row.get("pid_start")):
                    db.put_daemon(row["name"], {**row, "state": "stopped", "pid": None})
            db.commit()
    except (sqlite3.DatabaseError, DlctlError) as error:
        notes.warn(f"cannot write the run's database: {error} ({directory})")


def invited(snapshot: Snapshot) -> list[str]:
    """Whose invitations are valid now; [] if that cannot be read."""
    from dlctl.ops import remains  # imported late: it pulls in numpy
    from dlctl.records.memory import INVITATION, Memory

    with suppress(DlctlError):
        memory = Memory(remains.read_memory(snapshot.directory))
        return [name for name, (*_, ended) in memory.under(INVITATION) if not ended]
    return []


# ---------------------------------------------------------------- the shards that servers stored


def kept(snapshot: Snapshot) -> int:
    """The number of shards with a stored state; 0 if the job is of another version."""
    from dlctl.ops import remains  # imported late, here and below: it pulls in numpy
    from dlctl.runs import kept_shards

    with suppress(DlctlError):
        job = remains.read_jobfile(snapshot.directory)
        return len(kept_shards.kept(snapshot.directory, job.servers))
    return 0


def remove_kept(snapshot: Snapshot) -> None:
    """Remove the states left by killed servers; a state that a live server has open stays."""
    from dlctl.ops import remains
    from dlctl.runs import kept_shards

    with suppress(DlctlError):
        job = remains.read_jobfile(snapshot.directory)
        kept_shards.remove(snapshot.directory, job.servers)
