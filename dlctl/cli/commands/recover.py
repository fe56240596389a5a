"""`dlctl recover`: show what happened to a run and what is left of it, and recover it."""

from __future__ import annotations

import time
from contextlib import closing, nullcontext

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import json_option, run_argument, timeout_option
from dlctl.cli.ui import console, live, recovery
from dlctl.ops import cases, ready, recover
from dlctl.ops.cases import Case
from dlctl.runs import lock, select
from dlctl.runs.snapshot import load
from dlctl.util import values

SCHEMA = "dlctl.recover/1"


@make_command(
    examples=[
        ("dlctl recover --dry-run", "what died, what is left, and what would be lost"),
        ("dlctl recover", "recover the job"),
        ("dlctl recover mnist-7f3a --from-checkpoint", "discard everything after the checkpoint"),
        ("dlctl recover --checkpoint 1", "roll back to this one (dlctl checkpoint ls)"),
    ],
    see_also=["status", "start", "verify"],
)
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@click.option("--from-checkpoint", is_flag=True, help="Resume from the newest good checkpoint.")
@click.option(
    "--checkpoint", "number", type=click.IntRange(1), metavar="N", help="Resume from this one."
)
@timeout_option('Give up waiting after "90s", "5m" (exit code 6).')
@run_argument
@json_option
def command(
    dry_run: bool,
    from_checkpoint: bool,
    number: int | None,
    limit_s: float | None,
    job: str | None,
) -> None:
    """Use this for a run that has failed, or whose coordinator and agents are gone. If the
    coordinator's memory and all shards survive, the run resumes where it stopped and nothing is
    lost. Otherwise it resumes from its newest good checkpoint, and the command reports what is
    lost. A checkpoint that was saved because the workers' results were unusable is taken only if
    there is no other, or if --checkpoint names it. The job does not change: "dlctl start" takes a
    changed job file. Live settings stay in effect in a run that resumes where it stopped; a run
    that resumes from a checkpoint uses its job file again. The command leaves a live run alone; a
    run that was stopped or has finished continues with "dlctl start". In a live run, daemons that
    die are replaced automatically. Other hosts are queried for their state. The exit code is 5 if a
    required host is unreachable or a live coordinator does not answer (its agent replaces it), and
    1 if nothing is left to resume from.
    """
    directory = select.directory(job)
    with nullcontext() if dry_run else lock.claimed(directory):
        snapshot = load(directory, every_page=True)
        lock.check(snapshot)
        snapshot = recover.wait_led(snapshot)
        if not dry_run:
            snapshot = recover.wait_over(snapshot)
        case = cases.of_recover(snapshot, from_checkpoint=from_checkpoint, number=number)
        case = cases.looked(case)
        if not console.is_json():
            console.out("\n".join(recovery.lines(case, dry_run=dry_run)), flush=True)
        if refusal := cases.refusal(case):
            _show_json(case, done=False)
            raise refusal
        began, launched = time.monotonic(), None if dry_run else recover.perform(case)
        if launched is not None:
            with closing(live.open_progress()) as progress:
                after = ready.wait_ready(launched, limit_s, progress)
            if after.state == "failed":
                raise ready.failed(launched, "could not be recovered")
            took, step = values.duration(time.monotonic() - began), after.run.get("step")
            text = f"{after.run_id} is {after.state} again, at step {values.count(step)}"
            console.note(f"{text}, after {took}")
        _show_json(case, done=launched is not None)


def _show_json(case: Case, *, done: bool) -> None:
    console.show(SCHEMA, {**cases.as_data(case), "done": done}, "")
