"""`dlctl scale`: change the number of workers while the run continues."""

from __future__ import annotations

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import job_option, wait_options
from dlctl.cli.ui import console, live
from dlctl.errors import UsageError
from dlctl.job.config import COUNT_MAX
from dlctl.ops import control
from dlctl.runs import select
from dlctl.util import values


@make_command(
    "dlctl scale worker=8  # scale to 8 workers; returns when they are running",
    "dlctl scale worker=2 --no-wait  # the others leave once their portion is done",
)
@click.argument("wanted", metavar="ROLE=N")
@wait_options
@job_option
def command(wanted: str, limit_s: float | None, no_wait: bool, job: str | None) -> None:
    """New workers start with the servers' parameters. The workers with the highest numbers leave:
    each finishes its portion and its pushes, so nothing is lost. The number applies until the run
    ends; the job file does not change. Servers cannot be scaled in a live run.
    """
    workers = parse(wanted)
    snapshot = select.look(job)
    control.require_live(snapshot, "scaled")
    result = control.ask(snapshot, "scale", {"workers": workers})
    before, after = (values.count(result.get(key)) for key in ("before", "after"))
    starting, leaving = (result.get(key) or [] for key in ("starting", "leaving"))
    if not no_wait:
        with live.progress() as progress:
            control.wait(snapshot, starting, limit_s, f"{after} workers", progress, leaving)
    changes = [("new", starting), ("gone", leaving)]
    changed = "; ".join(f"{what}: {', '.join(names)}" for what, names in changes if names)
    console.out(console.escape(f"workers  {before} -> {after}  ({changed or 'no change'})"))


def parse(text: str) -> int:
    """The number of workers in "worker=8". Raises UsageError for anything else."""
    role, _, number = (part.strip() for part in text.partition("="))
    if role in ("server", "servers"):
        raise UsageError(
            "servers cannot be scaled in a live run: each of them owns a part of the model",
            hint="dlctl stop\nthen change count in [servers], and dlctl start JOBFILE",
        )
    is_count = number.isdecimal() and 1 <= int(number) <= COUNT_MAX
    if role not in ("worker", "workers") or not is_count:
        what = f'"{text}" is not worker=N, where N is 1 to {COUNT_MAX}'
        raise UsageError(what, hint="dlctl scale worker=8")
    return int(number)
