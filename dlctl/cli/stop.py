"""`dlctl stop`: end a run in order, wait until it has ended, and leave no process behind."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from dlctl.cli import (
    belonging,
    console,
    kept,
    knownruns,
    nextstep,
    otherhosts,
    pick,
    report,
    unreadable,
    values,
)
from dlctl.cli.countdown import Countdown
from dlctl.cli.group import command as make_command
from dlctl.cli.options import job_option
from dlctl.cli.snapshot import Snapshot, load
from dlctl.errors import DlctlError, Partial, TimedOut, Unreachable
from dlctl.runs import database, paths
from dlctl.util import processes
from dlctl.util.text import KILLED, plural

GRACE = "30s"
SAVE_S = 600.0
"""For the checkpoint, on top of the grace."""
MUTE_S = 3.0
"""How long --kill asks before it takes the processes by itself."""
EXIT_S = 15.0
"""For the coordinator's own end, after it has said that all is done."""
POLL_S = 0.05
LOST = "the coordinator died while the run was being stopped"


@make_command(
    "stop",
    examples=[
        ("dlctl stop", "finish the steps, save a checkpoint, end all daemons"),
        ("dlctl stop --no-checkpoint", "the same without saving"),
        ("dlctl stop --grace 5s", "less time for the workers' last steps"),
        ("dlctl stop --kill", "at once; what was not saved is lost"),
    ],
    see_also=["start", "status"],
)
@click.option(
    "--grace", default=GRACE, metavar="TIME", help=f"For the workers' last steps ({GRACE})."
)
@click.option("--no-checkpoint", is_flag=True, help="Do not save before the end.")
@click.option("--kill", is_flag=True, help="End everything at once.")
@job_option
def command(grace: str, no_checkpoint: bool, kill: bool, job: str | None) -> None:
    """Stop a job, saving first.

    The workers finish their steps and last pushes, the servers save, then all daemons end. A
    stopped job goes on from its checkpoint with "dlctl start". Stopping a stopped job does nothing.
    If the coordinator and its agent have died, the daemons they left behind are ended; what the
    servers have kept stays, and "dlctl recover" goes on with it. --kill removes it, too. The
    exit code is 8 if the job has stopped, but steps are lost because its last checkpoint failed.
    """
    grace_s = values.parse_duration(grace, "--grace")
    directory = pick.own_directory(job)
    snapshot = knownruns.load_any(directory) if kill else pick.read(directory)
    belonging.require_own(snapshot)
    if snapshot.state == knownruns.UNREADABLE or (kill and database.damage_of_log(directory)):
        _end_unreadable(snapshot)
        return
    if snapshot.is_live:
        save = not (no_checkpoint or kill)
        after = stop(snapshot, checkpoint=save, grace_s=grace_s, kill=kill)
        _tell(after)
        if after.state == "failed" and not kill:
            raise DlctlError(
                f"{after.run_id} has ended, but not in order: {after.reason}",
                hint=f"dlctl logs coordinator -j {after.run_id}",
            )
        if save:
            _require_saved(after)
        return
    left_s = 0.0 if kill else grace_s
    ended, away = clean_up(snapshot, left_s), list[str]()
    if kill or snapshot.state == "failed":  # After an orderly end nothing is left there.
        away = otherhosts.end(snapshot, left_s, purge=kill)
    if kill and snapshot.is_gone:
        record_end(snapshot.directory, "stopped", KILLED)
    if not ended and not away:
        text = f"{snapshot.run_id} has already ended ({snapshot.state}); no process of it is left"
        console.note(console.escape(text))
    _tell_kept(snapshot, kill)
    _require_reached(load(snapshot.directory), away)


def _end_unreadable(snapshot: Snapshot) -> None:
    """Whatever is found of a run whose database cannot be read. An agent that is still there may
    have started the next coordinator meanwhile: so twice.
    """
    for _ in range(2):
        rows = [found.row() for found in unreadable.living(snapshot.directory)]
        _end(rows, snapshot.run_id, 0.0)
    paths.remove_sockets(snapshot.run_id)
    away = otherhosts.end(snapshot, 0.0, purge=True)
    _tell_kept(snapshot, kill=True)
    console.note(console.escape(f"no process of {snapshot.run_id} is left here"))
    _require_reached(snapshot, away)


def _tell_kept(snapshot: Snapshot, kill: bool) -> None:
    """What the servers of an ended run have left: how to go on with it, or that it is removed."""
    held = kept.shards(snapshot)
    if held and kill:
        kept.remove(snapshot)
        console.note(f"its kept state ({plural(held, 'shard')}) is removed")
    elif held:
        remove = f"dlctl stop --kill -j {snapshot.run_id} removes it"
        console.note(console.escape(f"its state ({plural(held, 'shard')}) is kept; {remove}"))
    step = None if kill else nextstep.of(load(snapshot.directory))
    if step is not None:
        console.note(console.next_lines(step.text(), ""))


def stop(
    snapshot: Snapshot, *, checkpoint: bool, grace_s: float, kill: bool, origin: str = "command"
) -> Snapshot:
    """Stop a live run and wait for its end; returns the run as it is then.

    `origin`: who asks, see `STOPPED_BY` in `dlctl.roles.coordinator.shutdown`; the run's
    reason tells of it.
    Raises Unreachable, TimedOut, or Partial if processes are left that cannot be ended.
    """
    from dlctl.control import client

    arguments = {
        "names": [],
        "checkpoint": checkpoint,
        "grace_s": grace_s,
        "kill": kill,
        "origin": origin,
    }
    limit_s = MUTE_S if kill else grace_s + SAVE_S
    away: list[str] = []
    try:
        countdown = Countdown(None if kill else grace_s)
        client.ask(snapshot.directory, "stop", arguments, limit_s, countdown)
    except client.Gone:
        console.note("the coordinator is gone; ending what it left behind")
        state, reason = ("stopped", KILLED) if kill else ("failed", LOST)
        record_end(snapshot.directory, state, reason)
        clean_up(load(snapshot.directory), 0.0 if kill else grace_s)
        away = otherhosts.end(snapshot, 0.0 if kill else grace_s, purge=kill)
    except (Unreachable, TimedOut) as error:
        if not kill:
            raise
        console.warn(error.message)
        _kill_all(snapshot)
        away = otherhosts.end(snapshot, 0.0, purge=True)
    after = settle(snapshot, 0.0 if kill else EXIT_S)
    _require_reached(after, away)
    return after


def _require_reached(snapshot: Snapshot, away: list[str]) -> None:
    """Raises Partial if there are hosts on which something may go on."""
    if away:
        raise Partial(
            f"{snapshot.run_id} has {snapshot.state}, but {otherhosts.left_there(away)}",
            hint=f"when they can be reached again: dlctl stop --kill -j {snapshot.run_id}",
        )


def settle(snapshot: Snapshot, grace_s: float = EXIT_S) -> Snapshot:
    """Wait for the coordinator's own end and see to it that nothing is left of the run."""
    deadline = time.monotonic() + EXIT_S
    while time.monotonic() < deadline and _coordinator(snapshot):
        time.sleep(POLL_S)
    after = load(snapshot.directory)
    _end([*_coordinator(after), *left_of(after)], snapshot.run_id, grace_s)
    paths.remove_sockets(snapshot.run_id)
    after = load(snapshot.directory)
    if after.state in ("stopped", "finished"):
        kept.remove(after)
    return after


def _tell(snapshot: Snapshot) -> None:
    run_id, step = console.escape(snapshot.run_id), values.count(snapshot.run.get("step"))
    console.note(f"{run_id} {console.escape(snapshot.state)} at step {step}")
    row = snapshot.run.get("checkpoint")
    if isinstance(row, dict):
        console.note(f"checkpoint  {report.newest_checkpoint(snapshot)}")
        if text := report.without_residuals(row):
            console.warn(f"the checkpoint is {text}")
    if away := otherhosts.not_ended(snapshot):
        console.warn(
            f"{console.escape(', '.join(away))} could not be reached: what runs there ends by "
            f"itself within ten minutes, or with dlctl stop --kill -j {run_id}"
        )


def _require_saved(snapshot: Snapshot) -> None:
    """Say why a checkpoint that was wanted was not made.

    Raises Partial unless no worker had begun: then there was nothing to save.
    """
    error, row = snapshot.run.get("checkpoint_error"), snapshot.run.get("checkpoint")
    if error:
        why = f"the last checkpoint failed: {error}"
    elif isinstance(row, dict):
        return
    elif not report.has_begun(snapshot):
        console.note("no checkpoint was made: the run stopped before training had begun")
        return
    else:
        why = "no checkpoint was made"
    raise Partial(
        f"{snapshot.run_id} has {snapshot.state}, but {why}\n{_what_is_left(snapshot)}",
        hint=f"dlctl events -j {snapshot.run_id}",
    )


def _what_is_left(snapshot: Snapshot) -> str:
    row = snapshot.run.get("checkpoint")
    if not isinstance(row, dict):
        return "there is no older checkpoint: the same job file trains anew"
    behind = f"{plural(report.unsaved_steps(snapshot), 'step')} before the end"
    return f"the newest good checkpoint was saved at step {values.count(row.get('step'))}, {behind}"


def clean_up(snapshot: Snapshot, grace_s: float) -> list[str]:
    """End the daemons that are left on this machine of a run that has ended, or has no coordinator;
    returns their names. Those on other hosts are the business of `otherhosts`.

    They are known by their command lines and the run's records, never by a pid alone.
    """
    ended = _end(left_of(snapshot), snapshot.run_id, grace_s)
    paths.remove_sockets(snapshot.run_id)
    return ended


def _end(rows: Sequence[Mapping[str, Any]], run_id: str, grace_s: float) -> list[str]:
    if not rows:
        return []
    names = ", ".join(console.escape(row["name"]) for row in rows)
    console.note(f"still there: {names}; {_how(grace_s)}")
    ended, left = processes.end(rows, grace_s)
    if left:
        raise Partial(
            f"could not end {', '.join(left)} of {run_id}",
            hint="ps -o pid,stat,cmd " + " ".join(str(r["pid"]) for r in rows if r["name"] in left),
        )
    console.note(f"ended {', '.join(map(console.escape, ended))}")
    return ended


def _how(grace_s: float) -> str:
    if grace_s <= 0:
        return "killing them (SIGKILL)"
    return f"ending them (SIGTERM; SIGKILL only if they are still there after {grace_s:g}s)"


def left_of(snapshot: Snapshot) -> list[Mapping[str, Any]]:
    """Processes of a run that are there: those on record, and those that nobody knows of.

    Not the coordinator on record, which ends by itself.
    """
    from dlctl.launch import local

    known = processes.living(snapshot.daemons)
    pids = {row["pid"] for row in [*known, *_coordinator(snapshot)]}
    others = [found.row() for found in local.living(snapshot.directory) if found.pid not in pids]
    return [*known, *others]


def _coordinator(snapshot: Snapshot) -> list[Mapping[str, Any]]:
    keys = {key: snapshot.run.get(key) for key in ("pid", "pid_start")}
    return processes.living([{"name": "coordinator", **keys}])


def _kill_all(snapshot: Snapshot) -> None:
    """Everything at once, the coordinator first, so that nobody restarts what we end.

    An agent starts a dead coordinator again unless the run is over, so that is written before; and
    again, because a coordinator that was only slow may have written over it.
    """
    for _ in range(2):
        record_end(snapshot.directory, "stopped", KILLED)
        now = load(snapshot.directory)
        _end([*_coordinator(now), *left_of(now)], snapshot.run_id, 0.0)


def record_end(directory: Path, state: str, reason: str) -> None:
    """Write that the run is over: in this state, for this reason, without any daemon.

    From then on no agent starts its coordinator again. A database that cannot be written (a frozen
    coordinator has it locked, the disk is full, a page is damaged) is told, and left as it is.
    """
    try:
        with closing(database.RunDb(directory)) as db:
            if db.run().get("state") != state:
                db.put_end(state, reason, time.time())
            for row in db.daemons():
                if not processes.is_alive(row.get("pid"), row.get("pid_start")):
                    db.put_daemon(row["name"], {**row, "state": "stopped", "pid": None})
            db.commit()
    except sqlite3.DatabaseError as error:
        console.warn(f"cannot write the run's database: {error} ({directory})")
