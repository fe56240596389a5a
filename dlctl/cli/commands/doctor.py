"""`dlctl doctor`: check this machine, a job's hosts and the links between them for problems."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import PATH, json_option
from dlctl.cli.ui import console
from dlctl.errors import DlctlError, UsageError
from dlctl.health.findings import FAULT, OK, WARNING, Finding, by_place
from dlctl.health.network import count_text
from dlctl.ops import doctor

MARKS = {OK: "ok", WARNING: "warn", FAULT: "FAIL"}
COLORS = {OK: "green", WARNING: "yellow", FAULT: "red"}


@make_command(
    "dlctl doctor  # check this machine",
    "dlctl doctor job.toml  # also all hosts of a job, and the links between them",
    "dlctl doctor job.toml --host gpu2  # this machine and one host",
    "dlctl doctor job.toml --nodes  # also nodes, given for the check",
)
@click.argument("file", required=False, type=PATH)
@click.option("--host", metavar="HOST", help="Only this machine and this host of the job file.")
@click.option(
    "--nodes", is_flag=True,
    help="Ask a batch system for a few nodes, for a moment, and check these and their links.",
)  # fmt: skip
@json_option
def command(file: Path | None, host: str | None, nodes: bool) -> None:
    """Prints one line per check: "ok", "warn" if a job works but not as well as it could, or "FAIL"
    if it will not work; below "warn" and "FAIL", the fix. Without FILE, checks only this machine.
    Changes nothing. It also names your runs whose files other users can read, as those of older
    versions. The listeners for the measurement accept only connections of the same command,
    for a minute at most. Every link that the job needs carries test data for about 0.3 s each way,
    which slows a training on the same link.

    Of a batch system it checks the partitions: whether jobs start there, and whether they are
    preempted. A node cannot be asked before it is given. With --nodes small jobs of at most three
    minutes do that: one where the coordinator will be, if that is a job, and up to two where its
    workers will be. They start at once or not at all, and count as any job: on a partition that
    precedes others they may preempt.

    The exit code is 0 if there is no fault, also with warnings, and 1 if there is one; 2 for an
    invalid job file, and 4 for an unknown host.
    """
    from dlctl import jobfile  # imported late: it pulls in pydantic

    if file is None and (host is not None or nodes):
        raise UsageError(f"{'--nodes' if nodes else '--host'} needs the job file that has them")
    if host is not None and nodes:
        raise UsageError("--host is for hosts with a name, and --nodes for those that are given")
    job = None if file is None else jobfile.load(file)
    findings = doctor.findings(file, job, host, on_trial=nodes)
    count = Counter(finding.mark for finding in findings)
    rows = [finding.to_dict() for finding in findings]
    totals = {"faults": count[FAULT], "warnings": count[WARNING]}
    data = {"file": str(file or ""), **totals, "findings": rows}
    console.show("dlctl.doctor/1", data, "\n".join(lines(findings)))
    if count[FAULT]:
        again = f"dlctl doctor {shlex.quote(str(file))}" if file else "dlctl doctor"
        raise DlctlError(
            f"{count_text(count[FAULT], count[WARNING])} found",
            hint=f"fix what is marked {MARKS[FAULT]}, then run again: {again}",
        )
    warned = count_text(0, count[WARNING])
    console.note(f"no fault found{', ' + warned if warned else ''}")


def lines(findings: list[Finding]) -> list[str]:
    """The findings by place; with -q only warnings and faults."""
    width = max(len(mark) for mark in MARKS.values())
    shown: list[str] = []
    for place, group in by_place(findings).items():
        chosen = [f for f in group if f.mark != OK or not console.settings.quiet]
        shown += [console.style(place, bold=True)] if chosen else []
        subjects = max((len(console.escape(f.subject)) for f in chosen), default=0)
        for finding in chosen:
            mark = console.style(MARKS[finding.mark].ljust(width), fg=COLORS[finding.mark])
            subject = console.escape(finding.subject).ljust(subjects)
            shown.append(f"  {mark} {subject}  {console.escape(finding.found)}")
            if finding.mark != OK:
                shown.append(console.next_lines(finding.fix, f"  {' ' * width}   ", "fix: "))
    return shown
