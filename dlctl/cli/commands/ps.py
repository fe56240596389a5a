"""`dlctl ps`: all runs of this user, one line each."""

from __future__ import annotations

from typing import Any

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import json_option
from dlctl.cli.ui import console, report
from dlctl.runs import reach, select
from dlctl.runs.snapshot import Snapshot
from dlctl.util import values

RECENT_S = 86400.0


@make_command(
    "dlctl ps  # running jobs, and those of the last day",
    "dlctl ps -a  # all jobs whose run directory still exists",
    "dlctl ps -q  # only their ids, for scripts",
)
@click.option("-a", "--all", "show_all", is_flag=True, help="Also show runs that ended long ago.")
@json_option
def command(show_all: bool) -> None:
    """UP is how long it has run, stops left out; EPOCH is the number of passes over its data. A run
    whose coordinator is gone is "failed"; one whose coordinator sends no heartbeat is "not
    answering"; one whose database cannot be read is "unreadable".
    """
    snapshots = select.without_copies(select.all_of(select.directories()))
    snapshots = list(map(reach.seen, snapshots))
    shown = [
        snapshot
        for snapshot in reversed(snapshots)
        if show_all
        or snapshot.is_live
        or (ended_at := values.number(snapshot.run.get("ended_at"))) is None
        or snapshot.now - ended_at < RECENT_S
    ]
    data = {"runs": [report.as_data(s) for s in shown]}
    names = [s.run_id for s in shown]
    console.show("dlctl.ps/1", data, console.table(map(_row, shown)), names)
    if hidden := len(snapshots) - len(shown):
        console.note(f"{hidden} older not shown; all: dlctl ps -a")
    elif not snapshots:
        console.note("there are no runs yet; start with: dlctl init demo")


def _row(snapshot: Snapshot) -> dict[str, Any]:
    run = snapshot.run
    return {
        "RUN": snapshot.run_id,
        "STATE": report.run_state(snapshot),
        "ALGORITHM": run.get("algorithm"),
        ">DAEMONS": len(snapshot.daemons),
        ">STEP": values.count(run.get("step")),
        ">EPOCH": values.fixed(run.get("data_epoch"), 2),
        ">LOSS": values.decimal(run.get("loss")),
        ">UP": report.uptime(snapshot),
        "DIRECTORY": values.path(snapshot.directory),
    }
