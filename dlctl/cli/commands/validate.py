"""`dlctl validate`: check a job file offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.options import json_option
from dlctl.cli.ui import console


@make_command(
    "validate",
    examples=[
        ("dlctl validate job.toml", "report every problem"),
        ("dlctl validate --json job.toml", "the resolved job, with defaults filled in"),
    ],
    see_also=["plan", "doctor", "init", "run", "algorithms", "man"],
)
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def command(file: Path, as_json: bool) -> None:
    """Check a job file offline; report every problem.

    Starts nothing and does not import the task. Exits with 2 if the file is invalid. A valid key
    that will have no effect gives a warning.
    """
    from dlctl import jobfile
    from dlctl.config import to_dict
    from dlctl.jobfile import summary

    try:
        job = jobfile.load(file)
    except jobfile.JobFileError as error:
        if as_json:
            problems = [problem.to_dict() for problem in error.problems]
            _out_json(file, {"valid": False, "problems": problems, "warnings": [], "job": None})
        raise
    if as_json:
        doubts = jobfile.doubts(job)
        _out_json(file, {"valid": True, "problems": [], "warnings": doubts, "job": to_dict(job)})
        return
    for doubt in jobfile.doubts(job):
        console.warn(doubt)
    if not console.is_quiet():
        console.out(f"{console.escape(str(file))} is valid: {summary.of(job)}")


def _out_json(file: Path, value: dict[str, Any]) -> None:
    console.out_json("dlctl.validate/1", {"file": str(file), **value})
