"""`dlctl checkpoint`: save now, list, check, prune and export checkpoints."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from dlctl.cli.group import CommandGroup
from dlctl.cli.options import (
    OUTPUT,
    force_option,
    job_option,
    json_option,
    require_free,
    timeout_option,
)
from dlctl.cli.ui import console, live, report
from dlctl.errors import DlctlError, NotFound, UsageError
from dlctl.ops import checkpoint_choice, control, downloads, other_process
from dlctl.records import evaluated
from dlctl.records.manifest import FAILURE, Manifest, is_suspect, parts
from dlctl.runs import checkpoints, facts, select
from dlctl.stores import addresses, checkpoint_store
from dlctl.util import outfile, values
from dlctl.util.text import plural

TORCH_ENDINGS = (".pt", ".pth", ".bin")


@click.group(
    "checkpoint",
    CommandGroup,
    invoke_without_command=True,
    examples=[
        "dlctl checkpoint  # save now and wait until it is complete",
        "dlctl checkpoint ls  # list the checkpoints",
        "dlctl checkpoint export  # the newest one as a file for torch",
    ],
)
@job_option
@click.pass_context
def command(ctx: click.Context, job: str | None) -> None:
    """Without a subcommand it saves now."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(create, job=job)


@command.subcommand("dlctl checkpoint create --timeout 1h  # save a large model")
@timeout_option("How long to wait for it (10m).", "10m")
@job_option
@json_option
def create(limit_s: float, job: str | None) -> None:
    """Save now and wait until the checkpoint is complete."""
    row = control.save(select.look(job), limit_s, live.note_progress)
    if text := report.without_residuals(row):
        console.warn(f"the checkpoint is {text}")
    path = console.escape(values.path(str(row.get("path", ""))))
    size, took = values.size(row.get("nbytes")), values.duration(row.get("seconds"))
    text = f"step {values.count(row.get('step'))}  {size} in {took}  {path}"
    console.show("dlctl.checkpoint/1", values.timed(row), text)


@command.subcommand(
    "dlctl checkpoint ls -q  # only the directories, newest last",
    "dlctl checkpoint ls s3://bucket/mnist  # those in a mirror",
)
@click.argument("address", required=False, metavar="[ADDRESS]")
@job_option
@json_option
def ls(address: str | None, job: str | None) -> None:
    """List the complete checkpoints, of a job or at an address.

    The newest comes last. A checkpoint is complete if it has a manifest. If a file is missing or
    differs in size from the manifest, the checkpoint is marked as damaged; "dlctl checkpoint
    verify" checks every byte.
    """
    if address is not None:
        _list_stored(address)
        return
    snapshot = select.load_any(select.directory(job))
    finished = checkpoints.finished(snapshot.directory)
    damage = {path: checkpoints.verify(path, hashes=False) for path in finished}
    found = checkpoints.complete(snapshot.directory)
    best = checkpoint_choice.best(snapshot)
    rows = [_row(path, made, damage.get(path, []), path == best) for path, made in found.items()]
    data = values.timed({"run_id": snapshot.run_id, "checkpoints": rows})
    console.show("dlctl.checkpoints/1", data, console.table(map(_cells, rows)), names=found)
    if not found:
        console.note(f"{snapshot.run_id} has no complete checkpoint")
    for path, problems in damage.items():
        name = f"checkpoint {checkpoints.number(path)[0]}"
        if problems:
            console.warn("\n  ".join([f"{name} is damaged", *problems]))
        elif is_suspect(found.get(path, {})):
            console.note(f"{name} was saved when the run failed: the model may be ruined there")
    if error := facts.text(snapshot.run.get("checkpoint_error")):
        console.warn(f"the last attempt failed: {error}")


def _list_stored(text: str) -> None:
    """Those at an address; incomplete ones are named, and are none of them."""
    store = checkpoint_store.at(addresses.parse(text))
    contents = store.look()
    whose = contents.whose() or None
    rows = [
        _row(f"{store.address}/{name}", made, contents.missing(name), False)
        for name, made in contents.manifests.items()
    ]
    data = values.timed({"run_id": whose, "address": store.address, "checkpoints": rows})
    names = {row["directory"]: row for row in rows}
    console.show("dlctl.checkpoints/1", data, console.table(map(_cells, rows)), names=names)
    if not rows:
        console.note(f"{store.address} has no complete checkpoint")
    for row in rows:
        if row["problems"]:
            text = "\n  ".join([f"checkpoint {row['number']} is damaged", *row["problems"]])
            console.warn(text)
    for name, why in contents.unreadable.items():
        console.warn(f"{name} is damaged: {why}")
    left = [name for name in contents.sizes if name not in contents.manifests]
    if left := [name for name in left if name not in contents.unreadable]:
        console.note(f"incomplete, and passed over: {', '.join(sorted(left))}")


def _row(path: Path | str, made: Manifest, problems: list[str], is_best: bool) -> dict[str, Any]:
    return {
        "directory": str(path),
        "nbytes": sum(part["nbytes"] for part in parts(made)),
        "servers": len(made["shards"]),
        **{key: made[key] for key in ("number", "step", "samples", "at", evaluated.METRICS)},
        evaluated.STEP: made.get(evaluated.STEP),
        FAILURE: made.get(FAILURE),
        "problems": problems,
        "is_best": is_best,
    }


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    shown, at = values.measured(row[evaluated.METRICS]), row[evaluated.STEP]
    if at not in (None, row["step"]) and shown != values.NOTHING:  # It may have changed since.
        shown += f" (at step {values.count(at)})"
    return {
        ">NUMBER": row["number"],
        ">STEP": values.count(row["step"]),
        ">SAVED": values.ago(row["at"], time.time()),
        ">SIZE": values.size(row["nbytes"]),
        ">SERVERS": row["servers"],
        "FILES": console.style("damaged", fg="red") if row["problems"] else "all there",
        "EVALUATION": shown + (", the best" if row["is_best"] else ""),
        "DIRECTORY": values.path(row["directory"]),
    }


@command.subcommand(
    "dlctl checkpoint verify  # all checkpoints of the job",
    "dlctl checkpoint verify 12000  # that of step 12,000 (or with this number)",
    "dlctl checkpoint verify runs/mnist-7f3a/ckpt/000000012000-3  # one of any job",
    "dlctl checkpoint verify s3://bucket/mnist  # all in a mirror",
)
@click.argument("directory", required=False, metavar="[DIR|NUMBER|STEP|latest|best|ADDRESS]")
@job_option
@json_option
def verify(directory: str | None, job: str | None) -> None:
    """Check every byte against the manifest.

    Without an argument, checks all checkpoints of the job. The exit code is 1 if anything is wrong,
    and 4 if there is no such checkpoint.
    """
    hint = None
    if directory is not None and addresses.is_like(directory):
        _show_verified(_verified(directory), hint)
        return
    if directory is None:
        snapshot = select.load_any(select.directory(job))
        hint = f"dlctl checkpoint prune --damaged -j {snapshot.run_id}"
        chosen = checkpoints.finished(snapshot.directory)
        if not chosen:
            raise NotFound(f"{snapshot.run_id} has no checkpoint")
    else:
        chosen = [checkpoint_choice.chosen(directory, job)]
    found = {str(path): checkpoints.verify(path) for path in chosen}
    _show_verified(found, hint)


def _verified(text: str) -> dict[str, list[str]]:
    """What is wrong with those at an address, each."""
    store, contents, names = checkpoint_store.chosen(text)
    found = {
        f"{store.address}/{name}": store.problems(name, contents.manifests[name])
        for name in sorted(names, key=checkpoint_store.number)
    }
    bad = contents.unreadable if len(names) == len(contents.manifests) else {}
    return found | {f"{store.address}/{name}": [why] for name, why in bad.items()}


def _show_verified(found: dict[str, list[str]], hint: str | None) -> None:
    lines = []
    for path, problems in found.items():
        verdict = console.style("bad", fg="red") if problems else console.style("ok ", fg="green")
        lines.append(f"{verdict}  {console.escape(values.path(path))}")
        lines += [f"       | {console.escape(problem)}" for problem in problems]
    shown = [{"directory": str(p), "ok": not bad, "problems": bad} for p, bad in found.items()]
    console.show("dlctl.checkpoint-verify/1", {"checkpoints": shown}, "\n".join(lines))
    if bad := sum(1 for problems in found.values() if problems):
        raise DlctlError(f"damaged: {bad} of {plural(len(found), 'checkpoint')}", hint=hint)


@command.subcommand(
    "dlctl checkpoint prune --keep 1 --dry-run  # what would be removed",
    "dlctl checkpoint prune --keep 1  # keep the newest one",
    "dlctl checkpoint prune --damaged  # remove damaged ones, which are useless",
)
@click.option("--keep", type=click.IntRange(1), metavar="N", help="Keep the newest N good ones.")
@click.option("--damaged", is_flag=True, help="Remove damaged ones; checks every byte.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@job_option
@json_option
def prune(keep: int | None, damaged: bool, dry_run: bool, job: str | None) -> None:
    """Remove all but the newest ones.

    Keeps N good ones, after a check of every byte, a checkpoint that is being written, and the best
    one if checkpoints.best is set. One that was saved because the run had failed does not count
    towards N. Leftovers of older attempts are removed too. Damaged ones that are newer than these
    do not count; they stay, and are listed, unless --damaged is given.
    """
    if keep is None and not damaged:
        raise UsageError("nothing to remove: give --keep N or --damaged")
    snapshot = select.load_any(select.directory(job))
    paths, left = checkpoint_choice.unwanted(snapshot, keep, damaged)
    problems: list[str] = []
    removed = [p for p in paths if dry_run or checkpoints.remove(p, problems.append)]
    names = [values.path(path) for path in removed]
    verb = "would remove" if dry_run else "removed"
    lines = [f"{verb}  {console.escape(name)}" for name in names]
    data = {"run_id": snapshot.run_id, "removed": [*map(str, removed)], "dry_run": dry_run}
    schema = "dlctl.checkpoint-prune/1"
    console.show(schema, data | {"problems": problems}, "\n".join(lines), names)
    if not paths:
        console.note("nothing to remove")
    if left:
        numbers = sorted(checkpoints.number(path)[0] for path in left)
        kept = "; ".join(f"checkpoint {number} is damaged" for number in numbers)
        remove = f"dlctl checkpoint prune --damaged -j {snapshot.run_id}"
        console.note(f"kept  {kept}; to remove: {remove}")
    if problems:
        raise DlctlError("\n".join(problems), where=str(snapshot.directory / checkpoints.FOLDER))


@command.subcommand(
    "dlctl checkpoint export  # the newest good one, to ./NAME-STEP.safetensors",
    "dlctl checkpoint export -o model.pt  # for torch.load(weights_only=True)",
    "dlctl checkpoint export 3  # number 3",
    "dlctl checkpoint export best  # the best by checkpoints.best",
    "dlctl checkpoint export --average  # the moving average of [average]",
    "dlctl checkpoint export s3://bucket/mnist  # the newest good one in a mirror",
)
@click.argument("directory", default="latest", metavar="[DIR|NUMBER|STEP|latest|best|ADDRESS]")
@click.option(
    "-o",
    "--output",
    type=OUTPUT,
    help='File to write, "-" for standard output; .pt, .pth or .bin is for torch.load.  [default: '
    "NAME-STEP.safetensors]",
)
@click.option("--average", is_flag=True, help="The moving average of the parameters: [average].")
@force_option
@job_option
def export(
    directory: str, output: Path | None, average: bool, force: bool, job: str | None
) -> None:
    """Write the model as one file for torch.

    The file has the state_dict: parameters under their names and in their dtypes, tied ones and
    buffers included, so that model.load_state_dict accepts it. Without an argument, it exports the
    newest good checkpoint of the job.
    """
    if addresses.is_like(directory):
        with downloads.downloaded(directory, Path(tempfile.gettempdir())) as path:
            _export(path, output, average, force, directory)
        return
    path = checkpoint_choice.chosen(directory, job)
    _export(path, output, average, force, values.path(path))


def _export(path: Path, output: Path | None, average: bool, force: bool, shown: str) -> None:
    # The manifest is untrusted: its name must not lead to another directory.
    made = checkpoints.read_manifest(path)
    name = made["job"] if re.fullmatch(r"\w[\w.-]*", made["job"]) else "model"
    file = output or Path(f"{name}-{made['step']}.safetensors")
    kind = "torch" if file.suffix in TORCH_ENDINGS else "safetensors"
    require_free(force, file)
    arguments = [str(path), "--to", kind, "--output", str(file)]
    arguments += ["--average"] if average else []
    stdout = None if outfile.is_stdout(file) else subprocess.PIPE
    output_lines = other_process.run(
        "daemons.files.export", arguments, path, "the export failed", stdout=stdout
    )
    if output_lines:
        console.note(output_lines.rstrip("\n"))
    size = "" if outfile.is_stream(file) else f"{values.size(file.stat().st_size)}  "
    console.written(file, f"{size}from {shown}")
