"""`dlctl ps`: all runs of this user, one line each."""

from __future__ import annotations

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import json_option
from dlctl.cli.ui import console, report
from dlctl.runs import select
from dlctl.runs.snapshot import Snapshot
from dlctl.util import values

RECENT_S = 86400.0
COLUMNS: console.Columns[Snapshot] = {
    "RUN": lambda snapshot: snapshot.run_id,
    "STATE": report.run_state,
    "ALGORITHM": lambda snapshot: str(snapshot.run.get("algorithm", values.NOTHING)),
    ">DAEMONS": lambda snapshot: str(len(snapshot.daemons)),
    ">STEP": lambda snapshot: values.count(snapshot.run.get("step")),
    ">EPOCH": lambda snapshot: values.fixed(snapshot.run.get("data_epoch"), 2),
    ">LOSS": lambda snapshot: values.decimal(snapshot.run.get("loss")),
    ">UP": report.uptime,
    "DIRECTORY": lambda snapshot: values.path(snapshot.directory),
}


@make_command(
    examples=[
        ("dlctl ps", "running jobs, and those of the last day"),
        ("dlctl ps -a", "all jobs whose run directory still exists"),
        ("dlctl ps -q", "only their ids, for scripts"),
    ],
    see_also=["status", "logs"],
)
@click.option("-a", "--all", "show_all", is_flag=True, help="Also show runs that ended long ago.")
@json_option
def command(show_all: bool) -> None:
    """UP is the time since the start, or the duration of an ended run; EPOCH is the number of
    passes over its data. A run whose coordinator is gone is "failed"; one whose coordinator sends
    no heartbeat is "not answering"; one whose database cannot be read is "unreadable".
    """
    snapshots = select.without_copies(select.all_of(select.directories()))
    shown = [s for s in reversed(snapshots) if show_all or s.is_live or _is_recent(s)]
    data = {"runs": [report.as_data(s) for s in shown]}
    names = [s.run_id for s in shown]
    console.show("dlctl.ps/1", data, console.table(COLUMNS, shown), names)
    if hidden := len(snapshots) - len(shown):
        console.note(f"{hidden} older not shown; all: dlctl ps -a")
    elif not snapshots:
        console.note("there are no runs yet; start with: dlctl init demo")


def _is_recent(snapshot: Snapshot) -> bool:
    ended_at = values.number(snapshot.run.get("ended_at"))
    return ended_at is None or snapshot.now - ended_at < RECENT_S
