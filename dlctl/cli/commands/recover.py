"""`dlctl recover`: say what has become of a run, what is left of it, and bring it back."""

from __future__ import annotations

import time
from contextlib import nullcontext

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.options import Duration, json_option, run_argument
from dlctl.cli.ui import console, live, recovery
from dlctl.ops import cases, ready, recover
from dlctl.ops.cases import Case
from dlctl.runs import lock, select
from dlctl.runs.snapshot import load
from dlctl.util import values

SCHEMA = "dlctl.recover/1"


@make_command(
    "recover",
    examples=[
        ("dlctl recover --dry-run", "what died, what is left, and what would be lost"),
        ("dlctl recover", "bring the job back"),
        ("dlctl recover mnist-7f3a --from-checkpoint", "give up what came after it"),
        ("dlctl recover --checkpoint 1", "go back to this one (dlctl checkpoint ls)"),
    ],
    see_also=["status", "start", "verify"],
)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--from-checkpoint", is_flag=True, help="Resume from the newest good checkpoint.")
@click.option(
    "--checkpoint", "number", type=click.IntRange(1), metavar="N", help="Resume from this one."
)
@click.option(
    "--timeout", "limit_s", type=Duration(), help='Give up waiting after "90s", "5m" (exit code 6).'
)
@run_argument
@json_option
def command(
    dry_run: bool,
    from_checkpoint: bool,
    number: int | None,
    limit_s: float | None,
    job: str | None,
    as_json: bool,
) -> None:
    """Bring back a job that has died.

    This is for a run that has failed, or whose coordinator and agents are gone. If the
    coordinator's memory and all shards are there, the run goes on where it was and nothing is lost.
    Otherwise it resumes from its newest good checkpoint, and what is lost is said. One that was
    saved because nobody could use what the workers computed is taken if there is no other one, or
    if --checkpoint names it. The job stays as it was: "dlctl start" takes a changed job file. What
    was set live stays in force in a run that goes on where it was; in one that resumes, all is
    again as its job file had it. A run that lives is left alone, and one that was stopped or has
    finished goes on with "dlctl start". Daemons of a living run that die are replaced by
    themselves. Other hosts are asked for what is there; the exit code is 5 if one that is needed
    cannot be reached, or a coordinator that is there does not answer (it is replaced by itself),
    and 1 if nothing is left to go on from.
    """
    directory = select.own_directory(job)
    with nullcontext() if dry_run else lock.claimed(directory):
        snapshot = load(directory, every_page=True)
        lock.check(snapshot)
        snapshot = recover.wait_led(snapshot)
        if not dry_run:
            snapshot = recover.wait_over(snapshot)
        case = cases.of_recover(snapshot, from_checkpoint=from_checkpoint, number=number)
        case = cases.looked(case)
        if not as_json:
            console.out("\n".join(recovery.lines(case, dry_run=dry_run)), flush=True)
        if refusal := cases.refusal(case):
            _give(case, as_json, done=False)
            raise refusal
        began, launched = time.monotonic(), None if dry_run else recover.perform(case)
        if launched is not None:
            with live.shown() as progress:
                after = ready.wait_ready(launched, limit_s, progress)
            if after.state == "failed":
                raise ready.failed(launched, "could not be brought back")
            took, step = values.duration(time.monotonic() - began), after.run.get("step")
            text = f"{after.run_id} is {after.state} again, at step {values.count(step)}"
            console.note(console.escape(f"{text}, after {took}"))
        _give(case, as_json, done=launched is not None)


def _give(case: Case, as_json: bool, *, done: bool) -> None:
    if as_json:
        console.out_json(SCHEMA, {**cases.as_data(case), "done": done})
