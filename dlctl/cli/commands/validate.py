"""`dlctl validate`: check a job file offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlctl.cli.group import make_command
from dlctl.cli.options import file_argument, json_option
from dlctl.cli.ui import console
from dlctl.job.config import to_dict

SCHEMA = "dlctl.validate/1"


@make_command(
    "dlctl validate job.toml  # report every problem",
    "dlctl validate --json job.toml  # the resolved job, with defaults filled in",
)
@file_argument
@json_option
def command(file: Path) -> None:
    """Starts nothing and does not import the task. Exits with 2 if the file is invalid. A valid key
    that will have no effect gives a warning.
    """
    from dlctl import jobfile  # imported late: it pulls in pydantic
    from dlctl.jobfile import summary

    data: dict[str, Any] = {"file": str(file), "problems": [], "warnings": [], "job": None}
    try:
        job = jobfile.load(file)
    except jobfile.JobFileError as error:
        problems = [problem.to_dict() for problem in error.problems]
        console.show(SCHEMA, data | {"valid": False, "problems": problems}, "")
        raise
    warnings = jobfile.warnings(job)
    for warning in warnings if not console.settings.json else ():
        console.warn(warning)
    text = f"{console.escape(str(file))} is valid: {summary.of(job)}"
    data |= {"valid": True, "warnings": warnings, "job": to_dict(job)}
    console.show(SCHEMA, data, text, names=())
