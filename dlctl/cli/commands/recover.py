"""`dlctl recover`: say what has become of a run, what is left of it, and bring it back."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.options import complete_runs, job_option, json_option
from dlctl.cli.ui import console
from dlctl.errors import DlctlError, UsageError
from dlctl.ops.remains import Findings
from dlctl.runs import facts, select
from dlctl.runs.snapshot import Snapshot
from dlctl.util import hints, values
from dlctl.util.text import plural

SCHEMA = "dlctl.recover/1"
CHANGES_SHOWN = 3
"""Differences of the job file that are shown."""


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
@click.argument("run", required=False, metavar="[RUN]", shell_complete=complete_runs)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--from-checkpoint", is_flag=True, help="Resume from the newest good checkpoint.")
@click.option(
    "--checkpoint", "number", type=click.IntRange(1), metavar="N", help="Resume from this one."
)
@click.option("--timeout", metavar="TIME", help='Give up waiting after "90s", "5m" (exit code 6).')
@job_option
@json_option
def command(
    run: str | None,
    dry_run: bool,
    from_checkpoint: bool,
    number: int | None,
    timeout: str | None,
    job: str | None,
    as_json: bool,
) -> None:
    """Bring back a job that has died.

    This is for a run that has failed, or whose coordinator and agents are gone. If the
    coordinator's memory and all shards are there, the run goes on where it was and nothing is lost.
    Otherwise it resumes from its newest good checkpoint, and what is lost is said. One that was
    saved because nobody could use what the workers computed is taken if there is no other one, or
    if --checkpoint names it. What was set live stays in force in a run that goes on where it was;
    in one that resumes, all is again as its job file had it. A run that lives is left alone, and
    one that was stopped or has finished goes on with "dlctl start". Daemons of a living run that
    die are replaced by themselves. Other hosts are asked for what is there; the exit code is 5 if
    one that is needed cannot be reached, or a coordinator that is there does not answer (it is
    replaced by itself), and 1 if nothing is left to go on from.
    """
    limit_s = None if timeout is None else values.parse_duration(timeout, "--timeout")
    if run is not None and job is not None and run != job:
        raise UsageError(f'the run is given twice: "{run}" and -j "{job}"')
    directory = select.own_directory(run or job)

    from dlctl.ops import recover, remains
    from dlctl.runs import lock

    if not (was_led := remains.is_led(select.load_any(directory))):
        lock.check_database(directory)
    from_checkpoint = from_checkpoint or number is not None
    with nullcontext() if dry_run else lock.claimed(directory):
        snapshot = select.read(directory, every_page=False)
        lock.check(snapshot)
        snapshot = recover.wait_led(snapshot)
        if not dry_run:
            snapshot = recover.wait_over(snapshot)
        if was_led and not remains.is_led(snapshot):
            lock.check_database(directory)
        findings = remains.examine(snapshot, from_checkpoint=from_checkpoint, number=number)
        if not as_json:
            _tell(findings, remains.lines(findings))
        done = False
        step = _next(findings, from_checkpoint, number)
        data = {**remains.as_data(findings), **hints.as_data(step)}
        if findings.way in (remains.NOTHING, remains.AWAY, remains.SILENT):
            _give(data, as_json, done)
            raise _error(findings)
        if not dry_run:
            done = _act(findings, limit_s, from_checkpoint)
        elif not as_json and findings.way != remains.OVER:
            console.out(console.next_lines(step, "  ", "next        "))
        _give(data, as_json, done)


def _tell(findings: Findings, lines: list[str]) -> None:
    name = console.escape(findings.snapshot.run_id)
    console.out(f"{name}  {console.escape(findings.snapshot.state)}")
    if findings.way not in ("healthy", "silent", "over"):
        for line in lines:
            console.out(f"  {line}")
        _tell_changes(findings)
        _tell_live(findings)
    console.out(f"  {console.escape(_verdict(findings))}", flush=True)
    if findings.way == "over":
        hint = _how_to_start(findings.snapshot)
        console.out(console.next_lines(hint, "  ", "next        "), flush=True)


def _tell_changes(findings: Findings) -> None:
    from dlctl.ops import next_step

    if changed := _changes(findings.snapshot):
        says = ", ".join(changed[:CHANGES_SHOWN])
        start = f"dlctl start {next_step.job_file(findings.snapshot)}"
        takes = f"{start} takes that{_price_of_start(findings)}, and recover does not"
        console.out(f"  job file    {console.escape(f'says otherwise ({says}): {takes}')}")


def _tell_live(findings: Findings) -> None:
    """What becomes of what was set live."""
    from dlctl.ops import next_step

    live = next_step.set_live(findings.snapshot)
    if live and findings.way in ("go on", "resume"):
        becomes = "stays in force" if findings.way == "go on" else "is forgotten"
        console.out(f"  live        {console.escape(f'{live}: it {becomes}')}")


def _price_of_start(findings: Findings) -> str:
    """What the changed job file costs a run that could go on as it is: it takes a checkpoint."""

    if findings.way not in ("go on", "supervised") or not findings.was_at_work:
        return ""
    saved = facts.saved_step(findings.snapshot)
    if saved is None:
        return f" only with --fresh (no checkpoint has any of its {findings.done})"
    again = plural(max(0, findings.step - saved), "step")
    return f" from the checkpoint at step {values.count(saved)} ({again} done again)"


def _changes(snapshot: Snapshot) -> list[str]:
    """What the job file says otherwise than the run has it: recover does not take that."""
    from dlctl import jobfile
    from dlctl.config import to_dict
    from dlctl.ops.decide import differences
    from dlctl.runs.snapshot import read_job

    try:
        job = jobfile.load(Path(str(snapshot.run.get("job_file"))))
    except (DlctlError, OSError):
        return []
    content = json.loads(json.dumps(to_dict(job)))
    return [change.text() for change in differences(read_job(snapshot.directory), content)]


def _verdict(findings: Findings) -> str:
    """What can be done, and what it loses; a line."""
    if findings.way == "healthy":
        quarantined = _quarantined(findings.snapshot)
        rest = f"; {', '.join(quarantined)} in quarantine" if quarantined else ""
        return f"lives       its coordinator works: there is nothing to recover{rest}"
    if findings.way == "silent":
        silent = values.duration(findings.snapshot.silent_s)
        return f"silent      its coordinator has not answered for {silent}"
    if findings.way == "over":
        return f"over        it has {findings.snapshot.state}: nothing to recover"
    if findings.way == "away":
        return "result      it waits for its hosts: nobody else knows what is left there"
    if findings.way == "nothing":
        return "result      nothing is left to go on from"
    if findings.way == "resume":
        result = f"resumes from the checkpoint: {_losses(findings)}"
    elif findings.was_at_work:
        result = "it goes on where it was: nothing is lost"
    else:
        result = f"it never got to work{_why(findings.snapshot)}; it starts again"
    return f"result      {result}{_failure_to_come(findings)}"


def _why(snapshot: Snapshot) -> str:
    return f": {snapshot.reason}" if snapshot.reason else ""


def _failure_to_come(findings: Findings) -> str:
    """What happened once by the user's own code, or at the start, happens again; "" if not so."""
    from dlctl.ops import next_step

    snapshot = findings.snapshot
    place = next_step.place_of_error(snapshot)
    if place:
        return f". It will fail again until {place} is corrected"
    if next_step.is_ruined(snapshot) and findings.way == "go on":
        return f". But {next_step.RUINED}: then it will fail again"
    has_failed = snapshot.run.get("state") == "failed" and bool(snapshot.reason)
    if findings.was_at_work or not has_failed:
        return ""
    return ". It will fail again unless that is mended"


def _next(findings: Findings, from_checkpoint: bool, number: int | None) -> str:
    """The next command, and what to do before it."""
    from dlctl.ops import next_step

    snapshot = findings.snapshot
    if findings.way == "go on" and next_step.is_ruined(snapshot):
        return next_step.command(snapshot)
    if findings.way not in ("go on", "resume", "supervised") or not findings.was_at_work:
        return next_step.command(snapshot)
    place = next_step.place_of_error(snapshot)
    first = f"correct {place} first, then\n" if place else ""
    option = " --from-checkpoint" if from_checkpoint else ""
    option = option if number is None else f" --checkpoint {number}"
    return f"{first}dlctl recover{option} -j {snapshot.run_id}"


def _quarantined(snapshot: Snapshot) -> list[str]:
    return [row["name"] for row in snapshot.daemons if row.get("state") == "quarantined"]


def _losses(findings: Findings) -> str:
    parts = [f"{plural(findings.lost_steps, 'step')} done again"]
    exact = {shard.name for shard in findings.shards if shard.is_exact}
    for name, updates in findings.lost_updates().items():
        lost = "an unknown number of updates" if updates is None else plural(updates, "update")
        at_least = "at least " if updates is not None and name not in exact else ""
        parts.append(f"{at_least}{lost} of {name} lost")
    return ", ".join(parts)


def _how_to_start(snapshot: Snapshot) -> str:
    from dlctl.ops import next_step

    step = next_step.of(snapshot)
    goes_on = hints.told(f"dlctl start {next_step.job_file(snapshot)}", "goes on")
    return goes_on if step is None else step.text()


def _error(findings: Findings) -> DlctlError:
    """Of findings that nothing can be done with now."""
    from dlctl.control import unresponsive
    from dlctl.ops import recover

    if findings.way == "away":
        return recover.error_without_hosts(findings)
    if findings.way == "nothing":
        return _nothing(findings)
    snapshot = findings.snapshot
    run = {**snapshot.run, "daemons": snapshot.daemons}
    lasts = values.duration(snapshot.silent_s)
    return unresponsive.mute(snapshot.directory, run, lasts, str(snapshot.directory))


def _nothing(findings: Findings) -> DlctlError:
    from dlctl.ops import next_step

    snapshot = findings.snapshot
    why = "; ".join([*findings.obstacles, "there is no good checkpoint"])
    job_file = next_step.job_file(snapshot)
    anew = f"dlctl start --fresh {job_file}"
    if facts.all_damaged(snapshot):
        anew = next_step.when_all_damaged(snapshot.run_id, job_file)
    return DlctlError(
        f"nothing of {snapshot.run_id} can be recovered: {why}",
        where=str(snapshot.directory),
        hint=anew,
    )


def _act(findings: Findings, limit_s: float | None, from_checkpoint: bool) -> bool:
    """Bring it back, and wait until it is; False if there was nothing to do."""
    from dlctl.cli.ui import live
    from dlctl.ops import ready, recover, remains

    if findings.way in (remains.HEALTHY, remains.OVER):
        return False
    began = time.monotonic()
    if findings.way == remains.RESUME:
        asked = "that was asked for" if from_checkpoint else ""
        launched = recover.resume(findings, asked)
    else:
        launched = recover.go_on(findings)
    progress = live.open_progress()
    try:
        snapshot = ready.wait_ready(launched, limit_s, progress)
    finally:
        progress.close()
    if snapshot.state == "failed":
        raise ready.failed(launched, "could not be brought back")
    took = values.duration(time.monotonic() - began)
    step = values.count(snapshot.run.get("step"))
    console.note(
        console.escape(f"{snapshot.run_id} is {snapshot.state} again, at step {step}, after {took}")
    )
    return True


def _give(data: dict[str, Any], as_json: bool, done: bool) -> None:
    if as_json:
        console.out_json(SCHEMA, {**data, "done": done})
