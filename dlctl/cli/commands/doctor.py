"""`dlctl doctor`: what is in the way of a job, on this machine, on its hosts and between them."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.options import json_option
from dlctl.cli.ui import console
from dlctl.errors import DlctlError, UsageError
from dlctl.health.findings import FAULT, OK, WARNING, Finding, by_place
from dlctl.health.network import count_text

MARKS = {OK: "ok", WARNING: "warn", FAULT: "FAIL"}
COLORS = {OK: "green", WARNING: "yellow", FAULT: "red"}


@make_command(
    "doctor",
    examples=[
        ("dlctl doctor", "look at this machine"),
        ("dlctl doctor job.toml", "and at all hosts of a job, and the links between them"),
        ("dlctl doctor job.toml --host gpu2", "at this machine and one host"),
        ("dlctl doctor job.toml --json | jq '.findings[]'", "for programs"),
    ],
    see_also=["validate", "plan", "start"],
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--host", metavar="HOST", help="Only this machine and this host of the job file.")
@json_option
def command(file: Path | None, host: str | None, as_json: bool) -> None:
    """Look for what is in the way: here, on each host, between them.

    One line for each thing that was looked at: "ok", "warn" if a job works but not as well as it
    could, or "FAIL" if it will not work; below these two, the fix.
    Without FILE, only this machine is looked at. Nothing is changed, and what listens for the
    measurement takes only connections of the same command, for a minute at most. On every link
    that the job needs, some data is sent for about 0.3 s each way: a training that runs on the
    same link feels it.

    The exit code is 0 if there is no fault, also with warnings, and 1 if there is one. A job file
    that is not valid ends with 2, an unknown host with 4.
    """
    from dlctl import jobfile
    from dlctl.ops import doctor

    if file is None and host is not None:
        raise UsageError("--host needs the job file that this host is in")
    job = None if file is None else jobfile.load(file)
    findings = doctor.findings(file, job, host)
    count = Counter(finding.mark for finding in findings)
    if as_json:
        rows = [finding.to_dict() for finding in findings]
        totals = {"faults": count[FAULT], "warnings": count[WARNING]}
        console.out_json("dlctl.doctor/1", {"file": str(file or ""), **totals, "findings": rows})
    else:
        show(findings)
    if count[FAULT]:
        again = f"dlctl doctor {shlex.quote(str(file))}" if file else "dlctl doctor"
        raise DlctlError(
            f"{count_text(count[FAULT], count[WARNING])} found",
            hint=f"mend what is marked {MARKS[FAULT]}, then again: {again}",
        )
    if not as_json:
        warned = count_text(0, count[WARNING])
        console.note(f"no fault found{', ' + warned if warned else ''}")


def show(findings: list[Finding]) -> None:
    """By place; with -q only what is not good."""
    width = max(len(mark) for mark in MARKS.values())
    for place, group in by_place(findings).items():
        told = [f for f in group if f.mark != OK or not console.is_quiet()]
        subjects = max((len(console.escape(f.subject)) for f in told), default=0)
        if told:
            console.out(console.style(console.escape(place), bold=True))
        for finding in told:
            mark = console.style(MARKS[finding.mark].ljust(width), fg=COLORS[finding.mark])
            subject = console.escape(finding.subject).ljust(subjects)
            console.out(f"  {mark} {subject}  {console.escape(finding.found)}")
            if finding.mark != OK:
                console.out(console.next_lines(finding.fix, f"  {' ' * width}   ", "fix: "))
