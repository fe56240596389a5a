"""`dlctl scale`: change the number of workers while the run continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.options import job_option, wait_options
from dlctl.cli.ui import console, live
from dlctl.errors import UsageError
from dlctl.ops import control
from dlctl.runs import select
from dlctl.util import hints, values

EXAMPLE = "dlctl scale worker=8"


@make_command(
    "scale",
    examples=[
        ("dlctl scale worker=8", "scale to 8 workers; returns when they are running"),
        ("dlctl scale worker=2 --no-wait", "the others leave once their portion is done"),
    ],
    see_also=["status", "restart"],
)
@click.argument("wanted", metavar="ROLE=N")
@wait_options
@job_option
def command(wanted: str, limit_s: float | None, no_wait: bool, job: str | None) -> None:
    """Add or remove workers of a running job.

    New workers start with the servers' parameters. The workers with the highest numbers leave: each
    finishes its portion and its pushes, so nothing is lost. The number applies until the run ends;
    the job file does not change. Servers cannot be scaled in a live run.
    """
    workers = parse(wanted)
    snapshot = select.look(job)
    control.require_live(snapshot, "scaled")
    result = control.ask(snapshot, "scale", {"workers": workers})
    before, after = (values.count(result.get(key)) for key in ("before", "after"))
    starting, leaving = (_names(result, key) for key in ("starting", "leaving"))
    if not starting and not leaving:
        console.note(f"{console.escape(snapshot.run_id)} already has {after} workers")
        return
    if not no_wait:
        new = control.incarnations(snapshot, starting)
        with live.shown() as progress:
            control.wait(snapshot, new, limit_s, f"{after} workers", progress, leaving)
    console.out(f"workers  {before} -> {after}{_changes(starting, leaving)}")


def parse(text: str) -> int:
    """The number of workers in "worker=8". Raises UsageError for anything else."""
    role, equals, number = (part.strip() for part in text.partition("="))
    if not equals:
        raise UsageError(f'"{text}" is not ROLE=N', hint=EXAMPLE)
    if role in ("server", "servers"):
        raise UsageError(
            "servers cannot be scaled in a live run: each of them owns a part of the model",
            hint=hints.told(
                "dlctl stop", "then change count in [servers], and dlctl start JOBFILE"
            ),
        )
    if role not in ("worker", "workers"):
        text = f'"{role}" is not a role that can be scaled; only workers can be scaled'
        raise UsageError(text, hint=EXAMPLE)
    if not (number.isascii() and number.isdigit()):
        raise UsageError(f'"{number}" is not a number of workers', hint=EXAMPLE)
    from dlctl.config import COUNT_MAX  # imported late: it pulls in pydantic

    if not 1 <= int(number) <= COUNT_MAX:
        raise UsageError(f"a run has 1 to {COUNT_MAX} workers, not {number}", hint=EXAMPLE)
    return int(number)


def _names(result: Mapping[str, Any], key: str) -> list[str]:
    found = result.get(key)
    return [str(name) for name in found] if isinstance(found, list) else []


def _changes(starting: Sequence[str], leaving: Sequence[str]) -> str:
    parts = [("new", starting), ("gone", leaving)]
    changed = [f"{what}: {', '.join(names)}" for what, names in parts if names]
    return console.escape(f"  ({'; '.join(changed)})")
