"""`dlctl why`: which daemons wait for which, since when, and the root cause."""

from __future__ import annotations

from typing import Any

import click

from dlctl.cli import daemon_names
from dlctl.cli.group import make_command
from dlctl.cli.options import job_option, json_option
from dlctl.cli.ui import attention, console
from dlctl.ops import next_step, problem_texts, problems
from dlctl.ops.problems import Cause
from dlctl.runs import facts, select
from dlctl.runs.snapshot import Snapshot
from dlctl.util import values
from dlctl.util.names import COORDINATOR


@make_command(
    "dlctl why  # what blocks the job, the root cause first",
    "dlctl why worker-3  # only what concerns this worker",
)
@click.argument("name", required=False, metavar="[NAME]", shell_complete=daemon_names.complete)
@job_option
@json_option
def command(name: str | None, job: str | None) -> None:
    """Shows the problems of "dlctl status", and whatever else makes daemons wait: the slowest
    worker of a barrier, a daemon that starts or drains, a rate limit. Below each are the daemons
    that wait for it, and the command that helps. The exit code is 0 whatever the result.
    """
    snapshot = select.look(job)
    chosen = daemon_names.match([name], snapshot.roles()) if name is not None else []
    found = [p for p in problems.found(snapshot) if problem_texts.level(p) != "over"]
    causes = problems.forest(found) if snapshot.is_live or snapshot.is_gone else []
    if chosen and not any(cause.problem.daemon == COORDINATOR for cause in causes):
        causes = [cause for cause in causes if set(cause.names()) & set(chosen)]
    data = {
        "run_id": snapshot.run_id,
        "state": snapshot.state,
        "reason": snapshot.reason,
        "stale_s": snapshot.stale_s,
        "causes": [_as_data(snapshot, cause) for cause in causes],
    }
    console.show("dlctl.why/1", values.timed(data), "\n".join(_lines(snapshot, causes, chosen)))


def _lines(snapshot: Snapshot, causes: list[Cause], chosen: list[str]) -> list[str]:
    lines: list[str] = []
    fixes = attention.with_fixes(snapshot, [cause.problem for cause in causes])
    for cause, (problem, fix) in zip(causes, fixes, strict=True):
        lines.append(attention.line(problem, snapshot.now))
        lines += [console.next_lines(fix, "   ")] if fix else []
        lines += _waiting(snapshot, cause, 0)
    if lines:
        return lines
    waits = f"{', '.join(chosen)} waits for nothing" if chosen else "nothing waits"
    why = f": {snapshot.reason}" if snapshot.reason else ""
    state = f"{snapshot.run_id} {facts.became(snapshot.state)}{why}"
    rows = [(name, snapshot.daemon(name)) for name in chosen]
    doing = [
        f"  {name}: {facts.text(row.get('phase') or row.get('state'))}" for name, row in rows if row
    ]
    step = next_step.of(snapshot)
    then = [console.next_lines(step.text(), "   ")] if step is not None else []
    return [console.escape(f"{waits}: {state}"), *doing, *then]


def _waiting(snapshot: Snapshot, cause: Cause, depth: int) -> list[str]:
    lines = []
    for other in cause.waiting:
        text = console.escape(problem_texts.text(other.problem, snapshot.now))
        lines.append(f"{'   ' * depth}└─ {text}")
        lines += _waiting(snapshot, other, depth + 1)
    return lines


def _as_data(snapshot: Snapshot, cause: Cause) -> dict[str, Any]:
    waiting = [_as_data(snapshot, other) for other in cause.waiting]
    return {**problems.as_data(snapshot, cause.problem), "waiting": waiting}
