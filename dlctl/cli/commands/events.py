"""`dlctl events`: what happened to a run, in order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from dlctl.cli import daemon_names
from dlctl.cli.group import command as make_command
from dlctl.cli.options import Tail, job_option, json_option, moment
from dlctl.cli.ui import console, live, report
from dlctl.runs import facts, select
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import Snapshot
from dlctl.util import values

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Event = dict[str, Any]
TAIL = 50
KINDS = (
    "state", "start", "exit", "stop", "lost", "error", "sample", "silent", "late", "checkpoint",
    "quarantine", "batch", "recover", "resumed", "scale", "restart", "set", "evaluation", "target",
    "stream", "frozen",
)  # fmt: skip
"""The kinds that the coordinator writes. Unknown kinds of other versions are shown as well."""


def _complete_kinds(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(kind) for kind in KINDS if kind.startswith(incomplete)]


@make_command(
    "events",
    examples=[
        ("dlctl events", "the last 50 events"),
        ("dlctl events worker-2 -f", "what happens to one daemon, as it happens"),
        ("dlctl events --kind exit --kind silent --since 1h", "deaths in the last hour"),
        ("dlctl events --evaluations", "with evaluations of the model"),
    ],
    see_also=["status", "logs"],
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=daemon_names.complete)
@click.option("-f", "--follow", is_flag=True, help="Wait for more until the job ends.")
@click.option(
    "-n", "--tail", "tail", type=Tail("events"), help='Last N, or "all" (50; with --since: all).'
)
@click.option("--since", metavar="TIME", help='Only events since "10m" ago or an ISO time.')
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    shell_complete=_complete_kinds,
    help="Only events of this kind; may be given several times.",
)
@click.option("--evaluations", is_flag=True, help="Also show evaluations of the model.")
@job_option
@json_option
def command(
    names: tuple[str, ...],
    follow: bool,
    tail: int | None,
    since: str | None,
    kinds: tuple[str, ...],
    evaluations: bool,
    job: str | None,
    as_json: bool,
) -> None:
    """Show faults, recoveries and changes in order.

    Evaluations of the model are left out unless requested.
    KIND is one of: state (of the run), start, exit, stop, lost (what a death meant for the run),
    error, sample (that could not be loaded), silent, late, checkpoint (what it lacks), quarantine,
    batch (the chosen size), recover (a new coordinator took over), resumed (from a checkpoint, and
    the cost), scale, restart, set, evaluation.
    """
    snapshot = select.look(job)
    chosen = daemon_names.match(names, snapshot.roles()) if names else []
    since_at = moment(since, snapshot.now)

    def wanted(event: Event) -> bool:
        return (
            (not chosen or facts.is_about(event, chosen))
            and (event["kind"] in kinds if kinds else _is_news(event, evaluations))
            and (since_at is None or event["at"] >= since_at)
        )

    with closing(RunDb(snapshot.directory, readonly=True)) as db:
        found = list(db.events())
        last = found[-1]["id"] if found else 0
        shown = [event for event in found if wanted(event)]
        _print(shown[len(shown) - min(_limit(tail, since), len(shown)) :], as_json)
        if follow:
            with live.leaving(snapshot, "dlctl events -f"):
                _follow(snapshot, db, last, wanted, as_json)


def _limit(tail: int | None, since: str | None) -> int:
    """How many of the last events are shown."""
    if tail is None:
        return TAIL if since is None else sys.maxsize
    return sys.maxsize if tail == Tail.ALL else tail


def _is_news(event: Event, evaluations: bool) -> bool:
    """False for evaluations, unless requested, and for changes without effect."""
    data = event["data"]
    is_same = event["kind"] == "scale" and data.get("before", 0) == data.get("after", 1)
    return not is_same and (evaluations or event["kind"] != "evaluation")


def _follow(
    snapshot: Snapshot, db: RunDb, last: int, wanted: Callable[[Event], bool], as_json: bool
) -> None:
    def poll() -> None:
        nonlocal last
        for event in db.events(after=last):
            last = event["id"]
            if wanted(event):
                _print([event], as_json)

    live.follow(snapshot, poll)


def _print(events: list[Event], as_json: bool) -> None:
    now = time.time()
    for event in events:
        if as_json:
            console.out_json("dlctl.event/1", values.timed(event), flush=True)
        else:
            console.out(report.event(event, now), flush=True)
