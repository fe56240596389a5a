"""`dlctl status`: one run in depth, from its database alone; it needs no running daemon."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import closing

import click

from dlctl import rundb
from dlctl.cli import attention, console, pick, report, values
from dlctl.cli.group import command as make_command
from dlctl.cli.options import job_option, json_option
from dlctl.cli.snapshot import Snapshot, load
from dlctl.errors import NotRunning

RECENT_EVENTS = 10
WELL = ("running", "checkpointing")


@make_command(
    "status",
    examples=[
        ("dlctl status", "the job that runs, or the newest one"),
        ("dlctl status 'worker-*' --wide", "some daemons, with all columns and recent events"),
        ("dlctl status --watch", "again every 2 seconds"),
        ("dlctl status --check", "for scripts: exit code 3 unless all is well"),
        ("dlctl status --json | jq .loss", "for programs"),
    ],
    see_also=["ps", "logs", "events"],
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=pick.complete_daemons)
@click.option("--wide", is_flag=True, help="Show host, incarnation, memory, latencies, too.")
@click.option("--check", is_flag=True, help="Exit with 3 unless the job runs and is well.")
@click.option(
    "-w",
    "--watch",
    "every_s",
    type=click.FloatRange(0.1, 3600),
    is_flag=False,
    flag_value=2.0,
    metavar="[SEC]",
    help="Show it again every SEC seconds (2) until the job ends.",
)
@job_option
@json_option
def command(
    names: tuple[str, ...],
    wide: bool,
    check: bool,
    every_s: float | None,
    job: str | None,
    as_json: bool,
) -> None:
    """Show a job's daemons, rates and troubles.

    STEP of a server is its version (v): the updates it has applied. STALE is the mean
    staleness of a worker's pushes: updates by others between its fetch and its push. PUSH and FETCH
    are bytes per second now, and the limit if there is one. RST counts restarts.
    """
    snapshot = pick.pick(job)
    while True:
        _show(snapshot, names, wide, as_json, clear=every_s is not None and console.is_tty())
        if every_s is None or not snapshot.is_live:
            break
        try:
            time.sleep(every_s)
        except KeyboardInterrupt:
            return
        snapshot = load(snapshot.directory)
    if check and (snapshot.state not in WELL or snapshot.stale_s is not None):
        raise NotRunning(f"{snapshot.run_id} is {snapshot.state}, not running well")


def _show(
    snapshot: Snapshot, names: Sequence[str], wide: bool, as_json: bool, *, clear: bool
) -> None:
    known = {row["name"]: str(row.get("role", "")) for row in snapshot.daemons}
    chosen = pick.match_daemons(names, known) if known or names else []
    rows = [row for row in snapshot.daemons if row["name"] in chosen]
    if as_json:
        data = {**report.as_data(snapshot), "daemons": values.timed(rows)}
        console.out_json("dlctl.status/1", data, flush=True)
    elif console.is_quiet():
        console.out("\n".join(chosen), flush=True)
    else:
        text = "\n".join(_lines(snapshot, rows, wide, events=bool(names)))
        console.out(f"\x1b[H\x1b[2J{text}" if clear else text, flush=True)


def _lines(
    snapshot: Snapshot, rows: Sequence[report.Row], wide: bool, *, events: bool
) -> list[str]:
    lines = report.head(snapshot)
    if rows:
        lines.append(report.table(snapshot, rows, wide=wide))
    lines += attention.lines(snapshot, rows)
    lines += [f"  next        {line}" for line in [_how_it_goes_on(snapshot)] if line]
    return lines + (_recent_events(snapshot, [row["name"] for row in rows]) if events else [])


def _how_it_goes_on(snapshot: Snapshot) -> str:
    """What starting the job file again would do with a run that ended before its goal.

    "" if it lives or has finished, or if a newer run of the same file would be taken instead.
    """
    file = snapshot.run.get("job_file")
    if snapshot.is_live or snapshot.state not in ("failed", "stopped") or not isinstance(file, str):
        return ""
    newest = pick.of_job(file, str(snapshot.run.get("name")))[-1:]
    if [run.directory for run in newest] != [snapshot.directory.resolve()]:
        return ""
    command = f"dlctl start {console.escape(shlex.quote(values.path(file)))}"
    if snapshot.state == "failed" and _loses_nothing(snapshot):
        return (
            f"{command} goes on at step {values.count(snapshot.run.get('step'))}: nothing is lost"
        )
    step = report.saved_step(snapshot)
    if step is None:
        return f"{command} begins anew: there is no checkpoint to go on from"
    again = report.done_again(snapshot)
    return f"{command} goes on from the checkpoint at step {values.count(step)}{again}"


def _loses_nothing(snapshot: Snapshot) -> bool:
    """Whether all that a failed run has done is still there."""
    with closing(rundb.RunDb(snapshot.directory, readonly=True)) as db:
        if not values.number(snapshot.run.get("step")) or not db.memory():
            return False
    from dlctl.cli import recovery  # only here: it takes numpy along

    return recovery.can_go_on(snapshot.directory)


def _recent_events(snapshot: Snapshot, names: Sequence[str]) -> list[str]:
    with closing(rundb.RunDb(snapshot.directory, readonly=True)) as db:
        found = [event for event in db.events() if event["daemon"] in names][-RECENT_EVENTS:]
    shown = [report.event(event, snapshot.now) for event in found]
    return ["recent events", *(f"  {line}" for line in shown)] if shown else []
