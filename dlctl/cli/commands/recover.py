"""`dlctl recover`: show what happened to a run and what is left of it, and recover it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import json_option, run_argument, timeout_option
from dlctl.cli.ui import console, live
from dlctl.ops import cases, problems, ready, recover
from dlctl.ops.cases import Case
from dlctl.ops.decide import Action
from dlctl.runs import lock, select
from dlctl.runs.snapshot import Snapshot, load
from dlctl.util import values

SCHEMA = "dlctl.recover/1"


@make_command(
    "dlctl recover --dry-run  # what died, what is left, and what would be lost",
    "dlctl recover  # recover the job",
    "dlctl recover mnist-7f3a --from-checkpoint  # discard everything after the checkpoint",
    "dlctl recover --checkpoint 1  # roll back to this one (dlctl checkpoint ls)",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@click.option("--from-checkpoint", is_flag=True, help="Resume from the newest good checkpoint.")
@click.option(
    "--checkpoint", "number", type=click.IntRange(1), metavar="N", help="Resume from this one."
)
@timeout_option()
@run_argument
@json_option
def command(
    dry_run: bool, from_checkpoint: bool, number: int | None, limit_s: float | None, job: str | None
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
    directory = select.look(job).directory
    with nullcontext() if dry_run else lock.claimed(directory):
        snapshot = load(directory)
        lock.check(snapshot)
        snapshot = recover.settled(snapshot)
        case = cases.of_recover(snapshot, from_checkpoint=from_checkpoint, number=number)
        case = cases.looked(case)
        if not console.settings.json:
            console.out("\n".join(_lines(case, dry_run=dry_run)), flush=True)
        data = cases.as_data(case)
        if refusal := cases.refusal(case):
            console.show(SCHEMA, data | {"done": False}, "")
            raise refusal
        began, launched = time.monotonic(), None if dry_run else recover.perform(case)
        if launched is not None:
            with live.progress() as progress:
                after = ready.wait_ready(launched, limit_s, progress)
            if after.state == "failed":
                raise ready.failed(launched, "could not be recovered")
            took, step = values.duration(time.monotonic() - began), after.run.get("step")
            text = f"{after.run_id} is {after.state} again, at step {values.count(step)}"
            console.note(f"{text}, after {took}")
        console.show(SCHEMA, data | {"done": launched is not None}, "")


def _lines(case: Case, *, dry_run: bool) -> list[str]:
    """The findings, and the next command if this one does nothing; escaped."""
    assert case.run is not None
    plain = [f"{case.run.run_id}  {case.run.state}"]
    plain += [f"  {key:<10}  {value}" for key, value in _rows(case, case.run)]
    shown = [console.escape(line) for line in plain]
    if case.action is Action.OVER or (dry_run and case.action in (Action.CONTINUE, Action.RESUME)):
        shown.append(console.next_lines(cases.next_command(case), "  ", "next        "))
    return shown


def _rows(case: Case, run: Snapshot) -> Iterator[tuple[str, str]]:
    findings = case.findings
    if findings is not None:
        yield from (("cause", cause) for cause in problems.lines(run))
        yield "alive", ", ".join(findings.alive) or "none"
    if case.checkpoint is not None:
        path, data = case.checkpoint
        at = values.ago(data["at"], run.now)
        yield "checkpoint", f"step {values.count(data['step'])}, {at}, {values.path(path)}"
    yield from (("damaged", problem) for problem in case.damaged)
    for shard in findings.shards if findings is not None else ():
        state = "alive" if shard.alive else shard.problem or ("stored" if shard.path else "empty")
        at_least = "" if shard.is_exact or shard.alive else "at least "
        version = "" if shard.version is None else f", version {at_least}{shard.version:,}"
        where = f", {values.path(shard.path)}" if shard.path and not shard.alive else ""
        yield shard.name, f"{state}{version}{where}"
    cost = f": {case.cost or case.loss.text()}" if case.action is Action.RESUME else ""
    is_idle = case.action in (Action.ALREADY_RUNNING, Action.OVER)
    yield "result", f"{'nothing to recover: ' if is_idle else ''}{cases.headline(case)}{cost}"
