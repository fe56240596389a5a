"""`dlctl init`: a job file to start from, and a task, or a program with its own training loop."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import PATH, completing, force_option, require_free
from dlctl.cli.ui import console
from dlctl.errors import NotFound, UsageError, os_errors_as
from dlctl.ops import examples
from dlctl.util import outfile
from dlctl.util.did_you_mean import meant

NO_FOLDERS = ("runs", "__pycache__")
"""In the folder of an example that somebody has run."""
SMALLEST, LOOP = "own_task", "own_loop"


@make_command(
    "dlctl init demo  # write demo/job.toml and demo/train.py",
    "dlctl init  # write them here",
    "dlctl init --script demo  # the same with a training loop of its own",
    "dlctl init --example digits digits  # write an example into digits/",
)
@click.option(
    "--script",
    "has_loop",
    is_flag=True,
    help="Write a program with its own training loop, in place of a task.",
)
@click.option(
    "--example",
    metavar="NAME",
    shell_complete=completing(lambda ctx: examples.folders()),
    help="Write this example instead: chargpt, digits, fashion_mnist, glove, lightning, "
    "transformers, split, ray or word2vec.",
)
@click.argument("directory", default=".", metavar="[DIR]", type=PATH)
@force_option
def command(directory: Path, has_loop: bool, example: str | None, force: bool) -> None:
    """The task, or the program, trains a small network on generated data, so it runs unchanged.
    Change it to your own. The examples are whole projects, each with a README.md.
    """
    if has_loop and example:
        raise UsageError("--script and --example both say what to write", hint="use one of them")
    chosen = example or (LOOP if has_loop else SMALLEST)
    sources = files(chosen)
    folder = examples.folders()[chosen]
    targets = [directory / source.relative_to(folder) for source in sources]
    with os_errors_as("cannot write", directory):
        directory.mkdir(parents=True, exist_ok=True)
        require_free(force, *targets)
        for source, target in zip(sources, targets, strict=True):
            target.parent.mkdir(exist_ok=True)
            outfile.write(target, source.read_bytes())
            console.out(console.escape(str(target)))
    rows = []
    for target in targets:
        if target.suffix == ".toml":
            method = tomllib.loads(target.read_text(encoding="utf-8"))["algorithm"]["name"]
            rows.append((f"dlctl run {shlex.quote(str(target))}", f"trains with {method}"))
    console.commands([*rows, ("dlctl status", "shows its progress, from another terminal")])


def files(example: str) -> list[Path]:
    """All files of an example, but none of its runs. Raises NotFound, with all names."""
    known = examples.folders()
    if example not in known:
        text = f'there is no example "{example}"{meant(example, known)}'
        raise NotFound(text, hint=f"dlctl init --example, with one of {', '.join(known)}")
    beside = [path for path in known[example].iterdir() if path.is_file()]
    # Each party of split learning has a folder.
    below = (path for path in known[example].glob("*/*") if path.is_file())
    return sorted([*beside, *(path for path in below if path.parent.name not in NO_FOLDERS)])
