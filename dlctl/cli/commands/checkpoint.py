"""`dlctl checkpoint`: save now, list, check, prune and export checkpoints."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import click

from dlctl.cli.group import Entry, LazyGroup
from dlctl.cli.group import command as make_command
from dlctl.cli.options import job_option, json_option
from dlctl.cli.ui import console, report
from dlctl.cli.ui.live import Countdown
from dlctl.errors import DlctlError, NotFound, UsageError
from dlctl.ops import checkpoint_choice, disk, unreadable
from dlctl.runs import checkpoints, facts, lineage, preferred, select
from dlctl.runs.manifest import FAILURE, parts
from dlctl.runs.snapshot import Snapshot
from dlctl.util import hints, values
from dlctl.util.text import plural

Data = dict[str, Any]
HEADERS = ("NUMBER", "STEP", "SAVED", "SIZE", "SERVERS", "FILES", "EVALUATION", "DIRECTORY")
ENTRIES = {
    "create": Entry(
        "dlctl.cli.commands.checkpoint:create", "Save now (what no subcommand does, too)."
    ),
    "ls": Entry("dlctl.cli.commands.checkpoint:ls", "List the complete checkpoints."),
    "verify": Entry(
        "dlctl.cli.commands.checkpoint:verify", "Check every byte against the manifest."
    ),
    "prune": Entry("dlctl.cli.commands.checkpoint:prune", "Remove all but the newest ones."),
    "export": Entry(
        "dlctl.cli.commands.checkpoint_export:export", "Write the model as one file for torch."
    ),
}


@click.group(
    name="checkpoint",
    cls=LazyGroup,
    entries=ENTRIES,
    invoke_without_command=True,
    examples=[
        ("dlctl checkpoint", "save now and wait until it is complete"),
        ("dlctl checkpoint ls", "what there is"),
        ("dlctl checkpoint export", "the newest one as a file for torch"),
    ],
    see_also=["start", "stop"],
)
@job_option
@click.pass_context
def command(ctx: click.Context, job: str | None) -> None:
    """Save one now; ls, verify, prune and export those that there are.

    Without a subcommand it saves now. The job is the one that -j names, else the only one that
    runs, else the newest: of those in ./runs, if there are any.
    """
    ctx.obj = job
    if ctx.invoked_subcommand is None:
        _create(job, "10m", as_json=False)


@make_command(
    "create",
    examples=[("dlctl checkpoint create --timeout 1h", "save a large model")],
    see_also=["checkpoint ls"],
)
@click.option("--timeout", default="10m", metavar="TIME", help="How long to wait for it (10m).")
@job_option
@json_option
@click.pass_obj
def create(group_job: str | None, timeout: str, job: str | None, as_json: bool) -> None:
    """Save now and wait until the checkpoint is complete."""
    _create(job or group_job, timeout, as_json)


def _create(job: str | None, timeout: str, as_json: bool) -> None:
    from dlctl.control import client

    limit_s = values.parse_duration(timeout, "--timeout")
    snapshot = select.own(job)
    if not snapshot.is_live:
        raise _down(snapshot)
    try:
        row = client.ask(snapshot.directory, "checkpoint", {}, limit_s, Countdown(limit_s))
    except DlctlError as error:
        if os.strerror(errno.ENOSPC) in error.message:
            error.hint = error.hint or disk.make_room(snapshot)
        raise
    if row.get("error"):
        said = f"the checkpoint failed: {row['error']}"
        raise DlctlError(said, where=row.get("path"), hint=_after_failure(snapshot, said))
    if text := report.without_residuals(row):
        console.warn(f"the checkpoint is {text}")
    if as_json:
        console.out_json("dlctl.checkpoint/1", values.timed(row))
        return
    path = console.escape(values.path(str(row.get("path", ""))))
    size, took = values.size(row.get("nbytes")), values.duration(row.get("seconds"))
    console.out(f"step {values.count(row.get('step'))}  {size} in {took}  {path}")


def _after_failure(snapshot: Snapshot, said: str) -> str:
    """What has been written of a checkpoint is removed when it fails: there may be room again."""
    if disk.full_disk(snapshot) or os.strerror(errno.ENOSPC) in said:
        return disk.make_room(snapshot)
    return f"dlctl logs coordinator -l warning -j {snapshot.run_id}"


def _down(snapshot: Snapshot) -> DlctlError:
    """Nobody is there who could save; what a run that has failed did last may still be kept."""
    from dlctl.ops import next_step

    step = values.number(snapshot.run.get("step")) or 0.0
    if snapshot.state != "failed" or step <= (facts.saved_step(snapshot) or 0):
        return DlctlError(
            f"{snapshot.run_id} is {snapshot.state}: there is nothing new to save",
            hint=f"dlctl checkpoint ls -j {snapshot.run_id}",
        )
    goes_on = next_step.of(snapshot)
    return DlctlError(
        f"{snapshot.run_id} is down ({snapshot.state}, at step {values.count(step)}): nobody is "
        "there who could save it",
        hint=goes_on.text() if goes_on is not None else next_step.command(snapshot),
    )


@make_command(
    "ls",
    examples=[("dlctl checkpoint ls -q", "only the directories, newest last")],
    see_also=["checkpoint verify"],
)
@job_option
@json_option
@click.pass_obj
def ls(group_job: str | None, job: str | None, as_json: bool) -> None:
    """List the complete checkpoints, the newest last.

    Complete means that the manifest is there. One of which a file is missing, or has another size
    than the manifest says, is marked as damaged; "dlctl checkpoint verify" checks every byte.
    """
    snapshot = select.load_any(select.directory(job or group_job))
    damage = checkpoint_choice.visible_damage(snapshot.directory)
    found = [(d, checkpoints.read_manifest(d)) for d in checkpoints.complete(snapshot.directory)]
    best = checkpoint_choice.best(snapshot)
    if as_json:
        shown = [
            {**_as_data(path, data), "problems": damage[path], "is_best": path == best}
            for path, data in found
        ]
        console.out_json("dlctl.checkpoints/1", {"run_id": snapshot.run_id, "checkpoints": shown})
    elif console.is_quiet():
        for directory, _ in found:
            console.out(str(directory))
    elif found:
        rows = [
            _row(path, data, bool(damage[path]), snapshot.now, is_best=path == best)
            for path, data in found
        ]
        console.out(console.table(HEADERS, rows, HEADERS[:5]))
    else:
        what = "no checkpoint whose manifest can be read" if damage else "no checkpoint yet"
        console.note(f"{console.escape(snapshot.run_id)} has {what}")
    for path, problems in damage.items():
        if problems:
            told = "".join(f"\n  {problem}" for problem in problems)
            console.warn(f"checkpoint {checkpoints.number(path)[0]} is damaged{told}")
    if failed := [data["number"] for _, data in found if FAILURE in data]:
        why = "the model may be ruined there; what was saved before is kept as if they were not"
        console.note(f"{lineage.saved_at_failure(failed)}: {why}")
    for text in _failures(snapshot):
        console.warn(text)


def _as_data(directory: Path, data: Data) -> Data:
    keys = ("number", "step", "samples", "at", "evaluation")
    return {
        "directory": str(directory),
        "nbytes": _nbytes(data),
        "servers": len(data["shards"]),
        **values.timed({key: data[key] for key in keys}),
        FAILURE: data.get(FAILURE),
    }


def _row(
    directory: Path, data: Data, is_damaged: bool, now: float, *, is_best: bool = False
) -> list[str]:
    evaluation = console.escape(values.evaluation_at(data["evaluation"], data["step"]))
    return [
        str(data["number"]),
        values.count(data["step"]),
        values.ago(data["at"], now),
        values.size(_bytes_there(directory, data) if is_damaged else _nbytes(data)),
        str(len(data["shards"])),
        console.style("damaged", fg="red") if is_damaged else "all there",
        evaluation + (", the best" if is_best else ""),
        console.escape(values.path(directory)),
    ]


def _nbytes(data: Data) -> int:
    return sum(part["nbytes"] for part in parts(data))


def _bytes_there(directory: Path, data: Data) -> int:
    """The size of its files as they are, which may be fewer or shorter than the manifest says."""
    files = [directory / part["file"] for part in parts(data)]
    return sum(path.stat().st_size for path in files if path.is_file())


def _failures(snapshot: Snapshot) -> list[str]:
    error = snapshot.run.get("checkpoint_error")
    return [f"the last attempt failed: {error}"] if isinstance(error, str) and error else []


@make_command(
    "verify",
    examples=[
        ("dlctl checkpoint verify", "all checkpoints of the job"),
        ("dlctl checkpoint verify 12000", "that of step 12,000 (or of this number)"),
        ("dlctl checkpoint verify runs/mnist-7f3a/ckpt/000000012000-3", "one of any job"),
    ],
    see_also=["checkpoint ls"],
)
@click.argument("directory", required=False, metavar="[DIR|NUMBER|STEP|latest|best]")
@job_option
@json_option
@click.pass_obj
def verify(group_job: str | None, directory: str | None, job: str | None, as_json: bool) -> None:
    """Check every byte against the manifest.

    Without an argument all checkpoints of the job are checked. The exit code is 1 if anything is
    wrong, and 4 if there is no such checkpoint.
    """
    snapshot = select.load_any(select.directory(job or group_job)) if directory is None else None
    if snapshot is not None:
        chosen = checkpoints.finished(snapshot.directory)
        if not chosen:
            raise NotFound(f"{snapshot.run_id} has no checkpoint")
    elif directory is not None:
        chosen = [checkpoint_choice.chosen(directory, job or group_job)]
    found = {path: checkpoints.verify(path) for path in chosen}
    if as_json:
        shown = [{"directory": str(p), "ok": not bad, "problems": bad} for p, bad in found.items()]
        console.out_json("dlctl.checkpoint-verify/1", {"checkpoints": shown})
    else:
        for path, problems in found.items():
            _show_verdict(path, problems)
    bad = sum(1 for problems in found.values() if problems)
    if bad:
        verb = "is" if bad == 1 else "are"
        raise DlctlError(
            f"{bad} of {plural(len(found), 'checkpoint')} {verb} damaged",
            hint=_after_verdict(snapshot, bad < len(found)) if snapshot is not None else None,
        )


def _after_verdict(snapshot: Snapshot, is_any_good: bool) -> str:
    """What to do about damaged checkpoints of a run."""
    from dlctl.ops import next_step

    prune = hints.told(
        f"dlctl checkpoint prune --damaged -j {snapshot.run_id}", "removes the damaged ones"
    )
    anew = unreadable.anew(next_step.job_file(snapshot))
    return prune if is_any_good else hints.either(anew, prune)


def _show_verdict(path: Path, problems: list[str]) -> None:
    verdict = console.style("bad", fg="red") if problems else console.style("ok ", fg="green")
    console.out(f"{verdict}  {console.escape(values.path(path))}")
    for problem in problems:
        console.out(f"       | {console.escape(problem)}")


@make_command(
    "prune",
    examples=[
        ("dlctl checkpoint prune --keep 1 --dry-run", "what would be removed"),
        ("dlctl checkpoint prune --keep 1", "keep the newest one"),
        ("dlctl checkpoint prune --damaged", "remove what nothing can go on from"),
    ],
    see_also=["checkpoint ls", "checkpoint verify"],
)
@click.option("--keep", type=click.IntRange(1), metavar="N", help="Keep so many.")
@click.option("--damaged", is_flag=True, help="Remove those that are damaged; checks every byte.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@job_option
@json_option
@click.pass_obj
def prune(
    group_job: str | None,
    keep: int | None,
    damaged: bool,
    dry_run: bool,
    job: str | None,
    as_json: bool,
) -> None:
    """Remove all but the newest ones.

    N good ones stay, every byte of which is checked, and so does one that is being written, and the
    best one, if checkpoints.best says what is good. What
    was saved because the run had failed takes the place of no other one. What older attempts have
    left behind is removed, too. Damaged ones that are newer than these do not
    count; they stay, and are named, unless --damaged is given.
    """
    if keep is None and not damaged:
        raise UsageError("say what to remove: --keep N, or --damaged")
    snapshot = select.load_any(select.own_directory(job or group_job))
    if not checkpoints.finished(snapshot.directory):
        console.note(f"{console.escape(snapshot.run_id)} has no checkpoint yet")
    good, bad = _examined(snapshot.directory, None if damaged else keep)
    chosen = _unwanted(snapshot, keep, good, bad, damaged)
    problems: list[str] = []
    if not dry_run:
        chosen = [path for path in chosen if checkpoints.remove(path, problems.append)]
    if as_json:
        shown = {"run_id": snapshot.run_id, "removed": [*map(str, chosen)], "dry_run": dry_run}
        console.out_json("dlctl.checkpoint-prune/1", {**shown, "problems": problems})
    else:
        verb = "" if console.is_quiet() else "would remove  " if dry_run else "removed  "
        for path in chosen:
            console.out(verb + console.escape(values.path(path)))
        if not chosen:
            console.note("nothing to remove")
        left = [[path for path in paths if path not in chosen] for paths in (good, bad)]
        _tell_kept(snapshot.run_id, *left)
    if problems:
        raise DlctlError("\n".join(problems), where=str(snapshot.directory / checkpoints.FOLDER))


def _examined(run_directory: Path, wanted: int | None) -> tuple[list[Path], list[Path]]:
    """(good ones, damaged ones), the newest first, until `wanted` good ones are found; None: all.

    Every byte of them is read.
    """
    good, bad = list[Path](), list[Path]()
    for path in reversed(checkpoints.finished(run_directory)):
        if wanted is not None and len(good) == wanted:
            break
        (bad if checkpoints.verify(path) else good).append(path)
    return good, bad


def _unwanted(
    snapshot: Snapshot, keep: int | None, good: list[Path], bad: list[Path], damaged: bool
) -> list[Path]:
    """What is to be removed, the oldest first: a damaged one does not count as one that is kept."""
    run_directory = snapshot.directory
    found = set(bad) if damaged else set[Path]()
    if keep is not None and good:
        oldest = checkpoints.number(good[:keep][-1])
        readable = [checkpoints.number(path) for path in checkpoints.complete(run_directory)]
        window = sum(number >= oldest for number in readable)
        counts = preferred.counting(run_directory, [])
        old = checkpoints.superfluous(run_directory, window, good[0], counts)
        found |= {path for path in old if path != checkpoint_choice.best(snapshot)}
    return sorted(found, key=checkpoints.number)


def _tell_kept(run_id: str, good: list[Path], bad: list[Path]) -> None:
    """What stays, and why, as far as that may surprise."""
    if good:
        more = f" and {plural(len(good) - 1, 'older one')}" if len(good) > 1 else ""
        console.note(f"kept  {checkpoints.number(good[0])[0]} (the newest good one){more}")
    if bad:
        numbers = sorted(checkpoints.number(path)[0] for path in bad)
        remove = f"dlctl checkpoint prune --damaged -j {console.escape(run_id)}"
        console.note(f"kept  {lineage.damaged(numbers)}; to remove: {remove}")
