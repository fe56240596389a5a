"""The startup cost of the command line, against importing click."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.sandbox import console_script, sandbox

TAB = {"_DLCTL_COMPLETE": "bash_complete", "COMP_WORDS": "dlctl st", "COMP_CWORD": "1"}


def measure(*, quick: bool) -> list[Figure]:
    script = console_script()
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        "dlctl --help": ([script, "--help"], {}),
        "dlctl --version": ([script, "--version"], {}),
        "dlctl st<TAB>": ([script], TAB),
        "dlctl completion bash": ([script, "completion", "bash"], {}),
    }
    bare = partial(_run, [sys.executable, "-c", "import click"], {})
    figures = []
    with sandbox():
        for what, (command, variables) in commands.items():
            ours = partial(_run, command, variables)
            ours_s, bare_s = take_turns(1 if quick else 21, ours, bare)
            figures.append(ratio("cli", f"{what} / import click", ours_s, bare_s, asked=3.0))
    return figures


def _run(command: list[str], variables: dict[str, str]) -> None:
    """Raises CalledProcessError on a nonzero exit code."""
    environment = {**os.environ, **variables}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
