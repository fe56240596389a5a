"""`dlctl events`: what happened to a run, in order."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import closing
from typing import Any

import click

from dlctl.cli import daemon_names
from dlctl.cli.group import make_command
from dlctl.cli.options import follow_option, job_option, json_option, since_option, tail_option
from dlctl.cli.ui import console, live, report
from dlctl.runs import facts, select
from dlctl.runs.database import RunDb
from dlctl.util import values

Event = dict[str, Any]
TAIL = 50


@make_command(
    "dlctl events  # the last 50 events",
    "dlctl events worker-2 -f  # what happens to one daemon, as it happens",
    "dlctl events --kind exit --kind silent --since 1h  # deaths in the last hour",
    "dlctl events --evaluations  # with evaluations of the model",
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=daemon_names.complete)
@follow_option
@tail_option('Last N, or "all" (50; with --since: all).')
@since_option
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    help="Only events of this kind; may be given several times.",
)
@click.option("--evaluations", is_flag=True, help="Also show evaluations of the model.")
@job_option
@json_option
def command(
    names: tuple[str, ...],
    follow: bool,
    tail: int | None,
    since: float | None,
    kinds: tuple[str, ...],
    evaluations: bool,
    job: str | None,
) -> None:
    """Evaluations of the model are left out unless requested.
    KIND is one of: state (of the run), start, exit, stop, lost (what a death meant for the run),
    error, sample (that could not be loaded), silent, late, checkpoint (what it lacks), quarantine,
    batch (the chosen size), data (what is new in it), rounds (too few of them), recover (a new
    coordinator took over), resumed (from a checkpoint, and the cost), scale, restart, set,
    evaluation.
    """
    snapshot = select.look(job)
    chosen = daemon_names.match(names, snapshot.roles()) if names else []
    if tail is None:
        tail = TAIL if since is None else sys.maxsize

    def wanted(event: Event) -> bool:
        return (
            (not chosen or facts.is_about(event, chosen))
            and (event["kind"] in kinds if kinds else evaluations or event["kind"] != "evaluation")
            and (since is None or event["at"] >= since)
        )

    last = 0

    def show(limit: int = sys.maxsize) -> None:
        nonlocal last
        found = list(db.events(after=last))
        last = found[-1]["id"] if found else last
        for event in deque(filter(wanted, found), limit):
            console.show("dlctl.event/1", values.timed(event), report.event(event, time.time()))
        console.flush()

    with closing(RunDb(snapshot.directory, readonly=True)) as db:
        show(tail)
        if follow:
            live.follow(snapshot, show)
