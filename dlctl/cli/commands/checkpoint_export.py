"""`dlctl checkpoint export`: the model of a checkpoint as one file for torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.options import job_option
from dlctl.cli.ui import console
from dlctl.errors import DlctlError
from dlctl.ops.checkpoint_choice import chosen
from dlctl.runs import checkpoints
from dlctl.util import values

ENDINGS = {"safetensors": ".safetensors", "torch": ".pt"}
TORCH_ENDINGS = (".pt", ".pth", ".bin")


@make_command(
    "export",
    examples=[
        ("dlctl checkpoint export", "the newest good one, as NAME-STEP.safetensors here"),
        ("dlctl checkpoint export -o model.pt", "for torch.load(weights_only=True)"),
        ("dlctl checkpoint export 3 --to torch", "number 3, as NAME-STEP.pt"),
        ("dlctl checkpoint export best", "the best by what checkpoints.best names"),
        ("dlctl checkpoint export --average", "the moving average that [average] keeps"),
    ],
    see_also=["checkpoint ls"],
)
@click.argument("directory", default="latest", metavar="[DIR|NUMBER|STEP|latest|best]")
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
@click.option("--average", is_flag=True, help="The moving average of the parameters: [average].")
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
@job_option
@click.pass_obj
def export(
    group_job: str | None,
    directory: str,
    kind: str | None,
    output: Path | None,
    average: bool,
    force: bool,
    job: str | None,
) -> None:
    """Write the model as one file for torch.

    It holds the state_dict: parameters under their names and in their types, tied ones and buffers
    included, so that model.load_state_dict takes it as it is. Without DIR or NUMBER it is the
    newest good checkpoint of the job.
    """
    path = chosen(directory, job or group_job)
    kind = kind or ("torch" if output and output.suffix in TORCH_ENDINGS else "safetensors")
    file = output or Path(_file_stem(path) + ENDINGS[kind])
    if not force and file.is_file():
        raise DlctlError(
            f"{file.name} is already there; nothing was written",
            where=str(file),
            hint="write another file with -o FILE, or overwrite with --force",
        )
    _export(path, kind, file, of_average=average)
    size = values.size(file.stat().st_size)
    console.out(f"{console.escape(str(file))}  {size}  from {console.escape(values.path(path))}")


def _file_stem(directory: Path) -> str:
    """NAME-STEP. The manifest may be anybody's: its name must not lead to another directory."""
    data = checkpoints.read_manifest(directory)
    name = str(data["job"])
    plain = name == Path(name).name and not name.startswith(".") and name.isprintable()
    return f"{name if plain else 'model'}-{data['step']}"


def _export(directory: Path, kind: str, file: Path, *, of_average: bool) -> None:
    """Another process does it, because it needs torch. Its error becomes ours."""
    argv = [sys.executable, "-P", "-m", "daemons.files.export", str(directory), "--to", kind]
    argv += ["--output", str(file), "--errors", "json"]
    argv += ["--average"] if of_average else []
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise error_of(done.stderr, done.returncode, directory, "the export failed")
    for line in (done.stdout + done.stderr).splitlines():
        console.note(console.escape(line))


def error_of(stderr: str, code: int, where: Path, what: str) -> DlctlError:
    """The error that another process has written as JSON, or what else it says of its end.

    what: what has failed then, at `where`.
    """
    lines = stderr.strip().splitlines()
    try:
        facts = json.loads(lines[-1])
        error = DlctlError(facts["message"], where=facts["where"], hint=facts["hint"])
        error.exit_code = code
        return error
    except (IndexError, KeyError, TypeError, ValueError):
        words = "\n".join(lines) or values.exit_in_words(code)
        return DlctlError(f"{what}: {words}", where=str(where))
