"""`dlctl init`: a job file and a task to start from."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import PATH, force_option, require_free
from dlctl.cli.ui import console
from dlctl.errors import os_errors_as
from dlctl.util import outfile

TEMPLATE = Path(__file__).parents[1] / "template"
FILES = ("job.toml", "train.py")


@make_command(
    "dlctl init demo  # write demo/job.toml and demo/train.py",
    "dlctl init  # write them here",
)
@click.argument("directory", default=".", metavar="[DIR]", type=PATH)
@force_option
def command(directory: Path, force: bool) -> None:
    """The task trains a small network on generated data, so it runs unchanged. Change it to your
    own.
    """
    targets = [directory / name for name in FILES]
    with os_errors_as("cannot write", directory):
        directory.mkdir(parents=True, exist_ok=True)
        require_free(force, *targets)
        for target in targets:
            outfile.write(target, (TEMPLATE / target.name).read_bytes())
            console.out(console.escape(str(target)))
    run = f"dlctl run {shlex.quote(str(targets[0]))}"
    progress = "shows its progress, from another terminal"
    console.commands([(run, "trains; Ctrl-C stops"), ("dlctl status", progress)])
