"""`dlctl checkpoint`: save now, list, check, prune and export checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from dlctl import checkpoints, manifest
from dlctl.cli import console, pick, values
from dlctl.cli.group import Entry, LazyGroup
from dlctl.cli.group import command as make_command
from dlctl.cli.options import job_option, json_option
from dlctl.cli.snapshot import Snapshot
from dlctl.errors import DlctlError, NotFound, UsageError
from dlctl.text import plural

Data = dict[str, Any]
HEADERS = ("NUMBER", "STEP", "SAVED", "SIZE", "SERVERS", "EVALUATION", "DIRECTORY")
ENDINGS = {"safetensors": ".safetensors", "torch": ".pt"}
TORCH_ENDINGS = (".pt", ".pth", ".bin")
ENTRIES = {
    "create": Entry("dlctl.cli.checkpoint:create", "Save now (what no subcommand does, too)."),
    "ls": Entry("dlctl.cli.checkpoint:ls", "List the complete checkpoints."),
    "verify": Entry("dlctl.cli.checkpoint:verify", "Check every byte against the manifest."),
    "prune": Entry("dlctl.cli.checkpoint:prune", "Remove all but the newest ones."),
    "export": Entry("dlctl.cli.checkpoint:export", "Write the model as one file for torch."),
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
    """Save, list, check, prune and export checkpoints.

    Without a subcommand it saves now. The job is the one that -j names, else the only one that
    runs, else the newest.
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
    from dlctl import client

    limit_s = values.parse_duration(timeout, "--timeout")
    snapshot = pick.pick(job)
    if not snapshot.is_live:
        raise DlctlError(
            f"{snapshot.run_id} is {snapshot.state}: there is nothing new to save",
            hint=f"dlctl checkpoint ls -j {snapshot.run_id}",
        )
    row = client.ask(snapshot.directory, "checkpoint", {}, limit_s)
    if row.get("error"):
        raise DlctlError(f"the checkpoint failed: {row['error']}", where=row.get("path"))
    if as_json:
        console.out_json("dlctl.checkpoint/1", values.timed(row))
        return
    path = console.escape(values.path(str(row.get("path", ""))))
    size, took = values.size(row.get("nbytes")), values.duration(row.get("seconds"))
    console.out(f"step {values.count(row.get('step'))}  {size} in {took}  {path}")


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

    Complete means that the manifest is there; "dlctl checkpoint verify" checks every byte.
    """
    snapshot = pick.pick(job or group_job)
    found = [(d, checkpoints.read_manifest(d)) for d in checkpoints.complete(snapshot.directory)]
    if as_json:
        shown = [_as_data(directory, data) for directory, data in found]
        console.out_json("dlctl.checkpoints/1", {"run_id": snapshot.run_id, "checkpoints": shown})
    elif console.is_quiet():
        for directory, _ in found:
            console.out(str(directory))
    elif found:
        rows = [_row(directory, data, snapshot.now) for directory, data in found]
        console.out(console.table(HEADERS, rows, HEADERS[:5]))
    else:
        console.note(f"{console.escape(snapshot.run_id)} has no checkpoint yet")
    for text in _failures(snapshot):
        console.warn(text)


def _as_data(directory: Path, data: Data) -> Data:
    keys = ("number", "step", "samples", "at", "evaluation")
    return {
        "directory": str(directory),
        "nbytes": _nbytes(data),
        "servers": len(data["shards"]),
        **values.timed({key: data[key] for key in keys}),
    }


def _row(directory: Path, data: Data, now: float) -> list[str]:
    return [
        str(data["number"]),
        values.count(data["step"]),
        values.ago(data["at"], now),
        values.size(_nbytes(data)),
        str(len(data["shards"])),
        console.escape(values.evaluation(data["evaluation"])),
        console.escape(values.path(directory)),
    ]


def _nbytes(data: Data) -> int:
    return sum(part["nbytes"] for part in (*data["shards"], *data["workers"]))


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
@click.argument("directory", required=False, metavar="[DIR|NUMBER|STEP|latest]")
@job_option
@json_option
@click.pass_obj
def verify(group_job: str | None, directory: str | None, job: str | None, as_json: bool) -> None:
    """Check every byte against the manifest.

    Without an argument all checkpoints of the job are checked. The exit code is 1 if anything is
    wrong, and 4 if there is no such checkpoint.
    """
    if directory is None:
        snapshot = pick.pick(job or group_job)
        chosen = checkpoints.complete(snapshot.directory)
        if not chosen:
            raise NotFound(f"{snapshot.run_id} has no checkpoint")
    else:
        chosen = [_find(directory, job or group_job)]
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
        raise DlctlError(f"{bad} of {plural(len(found), 'checkpoint')} {verb} damaged")


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
    ],
    see_also=["checkpoint ls", "checkpoint verify"],
)
@click.option("--keep", type=click.IntRange(1), required=True, metavar="N", help="Keep so many.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@job_option
@json_option
@click.pass_obj
def prune(group_job: str | None, keep: int, dry_run: bool, job: str | None, as_json: bool) -> None:
    """Remove all but the newest ones.

    The newest good one stays in any case, also if newer ones are damaged, and so does one that is
    being written. What older attempts have left behind is removed, too.
    """
    snapshot = pick.pick(job or group_job)
    if not checkpoints.complete(snapshot.directory):
        console.note(f"{console.escape(snapshot.run_id)} has no checkpoint yet")
    problems: list[str] = []
    if dry_run:
        chosen = checkpoints.superfluous(snapshot.directory, keep)
    else:
        chosen = checkpoints.prune(snapshot.directory, keep, on_problem=problems.append)
    if as_json:
        shown = {"run_id": snapshot.run_id, "removed": [*map(str, chosen)], "dry_run": dry_run}
        console.out_json("dlctl.checkpoint-prune/1", {**shown, "problems": problems})
    else:
        verb = "" if console.is_quiet() else "would remove  " if dry_run else "removed  "
        for path in chosen:
            console.out(verb + console.escape(values.path(path)))
        if not chosen:
            console.note("nothing to remove")
    if problems:
        raise DlctlError("\n".join(problems), where=str(snapshot.directory / checkpoints.FOLDER))


@make_command(
    "export",
    examples=[
        ("dlctl checkpoint export", "the newest good one, as NAME-STEP.safetensors here"),
        ("dlctl checkpoint export -o model.pt", "for torch.load(weights_only=True)"),
        ("dlctl checkpoint export 3 --to torch", "number 3, as NAME-STEP.pt"),
    ],
    see_also=["checkpoint ls"],
)
@click.argument("directory", default="latest", metavar="[DIR|NUMBER|STEP|latest]")
@click.option(
    "--to",
    "kind",
    type=click.Choice(sorted(ENDINGS)),
    help="Format.  [default: by the ending of -o, else safetensors]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File to write.  [default: NAME-STEP.safetensors or .pt, in this directory]",
)
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
@job_option
@click.pass_obj
def export(
    group_job: str | None,
    directory: str,
    kind: str | None,
    output: Path | None,
    force: bool,
    job: str | None,
) -> None:
    """Write the model as one file for torch.

    It holds the state_dict: parameters under their names and in their types, tied ones and buffers
    included, so that model.load_state_dict takes it as it is. Without DIR or NUMBER it is the
    newest good checkpoint of the job.
    """
    path = _find(directory, job or group_job)
    kind = kind or ("torch" if output and output.suffix in TORCH_ENDINGS else "safetensors")
    file = output or Path(_file_stem(path) + ENDINGS[kind])
    if not force and file.is_file():
        raise DlctlError(
            f"{file.name} is already there; nothing was written",
            where=str(file),
            hint="write another file with -o FILE, or overwrite with --force",
        )
    _export(path, kind, file)
    size = values.size(file.stat().st_size)
    console.out(f"{console.escape(str(file))}  {size}  from {console.escape(values.path(path))}")


def _file_stem(directory: Path) -> str:
    """NAME-STEP. The manifest may be anybody's: its name must not lead to another directory."""
    data = checkpoints.read_manifest(directory)
    name = str(data["job"])
    plain = name == Path(name).name and not name.startswith(".") and name.isprintable()
    return f"{name if plain else 'model'}-{data['step']}"


def _export(directory: Path, kind: str, file: Path) -> None:
    """Another process does it, because it needs torch. Its error becomes ours."""
    argv = [sys.executable, "-P", "-m", "daemons.export", str(directory), "--to", kind]
    argv += ["--output", str(file), "--errors", "json"]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise _error_of(done.stderr, done.returncode, directory)
    for line in (done.stdout + done.stderr).splitlines():
        console.note(console.escape(line))


def _error_of(stderr: str, code: int, directory: Path) -> DlctlError:
    """The error that the other process has written as JSON, or what else it says of its end."""
    lines = stderr.strip().splitlines()
    try:
        facts = json.loads(lines[-1])
        error = DlctlError(facts["message"], where=facts["where"], hint=facts["hint"])
        error.exit_code = code
        return error
    except (IndexError, KeyError, TypeError, ValueError):
        words = "\n".join(lines) or values.exit_in_words(code)
        return DlctlError(f"the export failed: {words}", where=str(directory))


def _find(text: str, job: str | None) -> Path:
    """A checkpoint by its path, its number within the run, its step, or "latest" (the newest good
    one). The newest one of that step, if several have it.
    """
    if (Path(text) / manifest.MANIFEST).is_file():
        return Path(text).absolute()
    snapshot = pick.pick(job)
    if text == "latest":
        good = checkpoints.newest_good(snapshot.directory, console.warn)
        if good is None:
            raise NotFound(
                f"{snapshot.run_id} has no good checkpoint",
                hint=f"dlctl checkpoint ls -j {snapshot.run_id}",
            )
        return good[0]
    found = checkpoints.complete(snapshot.directory)
    for directory in found:
        if text in (directory.name, str(checkpoints.number(directory)[0])):
            return directory
    of_step = [d for d in found if text.isascii() and text == str(checkpoints.number(d)[1])]
    if of_step:
        return of_step[-1]
    if not text.isascii() or not text.isdigit():
        raise UsageError(f'"{text}" is no checkpoint directory: it has no {manifest.MANIFEST}')
    known = ", ".join(str(checkpoints.number(directory)[0]) for directory in found) or "none"
    raise NotFound(f"{snapshot.run_id} has no checkpoint of number or step {text}; known: {known}")
