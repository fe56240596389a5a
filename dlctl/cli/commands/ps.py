"""`dlctl ps`: all runs of this user, one line each."""

from __future__ import annotations

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.options import json_option
from dlctl.cli.ui import console, report
from dlctl.runs import select
from dlctl.runs.snapshot import Snapshot
from dlctl.util import values

RECENT_S = 86400.0
HEADERS = ("RUN", "STATE", "ALGORITHM", "DAEMONS", "STEP", "EPOCH", "LOSS", "UP", "DIRECTORY")
RIGHT = ("DAEMONS", "STEP", "EPOCH", "LOSS", "UP")


@make_command(
    "ps",
    examples=[
        ("dlctl ps", "running jobs, and those of the last day"),
        ("dlctl ps -a", "all jobs whose run directory still exists"),
        ("dlctl ps -q", "only their ids, for scripts"),
    ],
    see_also=["status", "logs"],
)
@click.option("-a", "--all", "show_all", is_flag=True, help="Also show runs that ended long ago.")
@json_option
def command(show_all: bool, as_json: bool) -> None:
    """List jobs.

    UP is the time since the start, or the duration of an ended run; EPOCH is the number of passes
    over its data. A run whose coordinator is gone is "failed"; one whose coordinator sends no
    heartbeat is "not answering"; one whose database cannot be read is "unreadable".
    """
    snapshots = select.without_copies(select.all_of(select.directories()))
    shown = [s for s in reversed(snapshots) if show_all or s.is_live or _is_recent(s)]
    if as_json:
        console.out_json("dlctl.ps/1", {"runs": [report.as_data(s) for s in shown]})
    elif console.is_quiet():
        for snapshot in shown:
            console.out(snapshot.run_id)
    elif shown:
        console.out(console.table(HEADERS, [_row(s) for s in shown], RIGHT))
    _note_hidden(len(snapshots), len(shown))


def _note_hidden(known: int, shown: int) -> None:
    if known > shown:
        console.note(f"{known - shown} older not shown; all: dlctl ps -a")
    elif not known:
        console.note("there are no runs yet; start with: dlctl init demo")


def _is_recent(snapshot: Snapshot) -> bool:
    ended_at = values.number(snapshot.run.get("ended_at"))
    return ended_at is None or snapshot.now - ended_at < RECENT_S


def _row(snapshot: Snapshot) -> list[str]:
    run = snapshot.run
    return [
        console.escape(snapshot.run_id),
        report.run_state(snapshot),
        console.escape(str(run.get("algorithm", values.NOTHING))),
        str(len(snapshot.daemons)),
        values.count(run.get("step")),
        values.fixed(run.get("data_epoch"), 2),
        values.decimal(run.get("loss")),
        report.uptime(snapshot),
        console.escape(values.path(snapshot.directory)),
    ]
