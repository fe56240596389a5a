"""What `status` says below its table: who needs attention, their last words, the next command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlctl.cli.ui import console, report
from dlctl.ops import next_step, problems
from dlctl.ops.problems import Problem
from dlctl.runs import facts
from dlctl.runs.facts import Row
from dlctl.runs.snapshot import Snapshot
from dlctl.settings import AUTO
from dlctl.util import hints, values
from dlctl.util.names import COORDINATOR
from dlctl.util.text import COORDINATOR_GONE, grave, is_birth

LAST_LINES = 3
_STARTING = ("starting", "recovering", "draining")


def lines(snapshot: Snapshot, rows: Sequence[Row]) -> list[str]:
    """Of these daemons, those that are not well or make others wait; and how the run goes on."""
    chosen = {str(row["name"]): row for row in rows}
    found = [problem for problem in problems.found(snapshot) if problem.daemon in chosen]
    shown = []
    for problem, after in zip(found, [*found, None][1:], strict=True):
        if after is not None and after.fix == problem.fix:
            problem = problem._replace(fix="")  # Said once, below the last of them.
        shown += _problem(snapshot, problem, chosen[problem.daemon])
    told = {problem.daemon for problem in found}
    for name, row in chosen.items():
        if snapshot.is_live and row.get("state") in _STARTING and name not in told:
            what = facts.doing(row, snapshot.now)
            what = "it starts" if name == COORDINATOR else what
            shown.append(f"· {console.escape(name)}: {what}")
    return [*shown, *_bound(snapshot, rows), *_run_itself(snapshot)]


def _bound(snapshot: Snapshot, rows: Sequence[Row]) -> list[str]:
    """Workers whose link needs longer intervals than "auto" may choose."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows if snapshot.is_current else ():
        bound = facts.metrics(row).get("bound")
        for key, steps in bound.items() if isinstance(bound, Mapping) else ():
            found.setdefault((str(key), values.count(steps)), []).append(str(row["name"]))
    return [
        console.escape(
            f"· {', '.join(names)}: {key} = {AUTO} stands at its most, {steps} steps: "
            "the link needs more"
        )
        for (key, steps), names in found.items()
    ]


def _problem(snapshot: Snapshot, problem: Problem, row: Row) -> list[str]:
    is_silent = snapshot.silent_s is not None
    if is_silent and problem.daemon != COORDINATOR:
        return []  # What is known of it is old.
    mark = console.style("!", fg="red") if problem.is_grave else "·"
    old = "; what is above is old" if is_silent else ""
    text = console.escape(f"{problem.daemon} {problem.text}{old}")
    shown = [f"{mark} {text}{report.code(problem.code)}"]
    shown += [f"       | {console.escape(word)}" for word in _last_words(snapshot, problem, row)]
    if problem.fix and snapshot.is_live and not _is_told_by_the_run(snapshot, problem):
        shown.append(console.next_lines(problem.fix, " " * 7))
    return shown


def _is_told_by_the_run(snapshot: Snapshot, problem: Problem) -> bool:
    step = next_step.of(snapshot)
    return step is not None and step.command in problem.fix


def _last_words(snapshot: Snapshot, problem: Problem, row: Row) -> list[str]:
    """What the process that is told of has said last, if it has ended."""
    last = problems.last_exit(row, problem.incarnation)
    words = last.get("last_lines") if last is not None else None
    if last is None or not isinstance(words, list):
        return []
    said = [str(word) for word in words if not is_birth(str(word))]
    if snapshot.coordinator["state"] == "running":
        # It is there: that it was gone was long ago, and is nobody's cause.
        said = [word for word in said if not word.endswith(COORDINATOR_GONE)]
    was_killed = (values.number(last.get("code")) or 0) < 0
    # What it said before that, while all was well, is no cause.
    return (grave(said) if was_killed else said)[-LAST_LINES:]


def _run_itself(snapshot: Snapshot) -> list[str]:
    """What is still there of a run that has ended, and how it goes on."""
    shown = []
    there = [] if snapshot.is_live else problems.still_there(snapshot)
    if there:
        left = [f"{row['name']} (pid {row['pid']})" for row in there]
        ends = f"to give the run up, dlctl stop -j {snapshot.run_id} ends them"
        shown.append(console.escape(f"  still there {', '.join(left)}; {ends}"))
    if snapshot.state == "failed" and not snapshot.is_live:
        shown.append(console.escape(f"  why         dlctl logs --failed -j {snapshot.run_id}"))
    step = next_step.of(snapshot)
    if step is not None:
        shown.append(console.next_lines(step.text(), "  ", "next        "))
    return shown


def unwell(snapshot: Snapshot) -> str:
    """Why a run is not well, in a sentence; "" if it is."""
    name, run = snapshot.run_id, snapshot.run
    if snapshot.silent_s is not None:
        return f"{name} has not answered for {values.duration(snapshot.silent_s)}"
    if snapshot.state not in ("running", "checkpointing"):
        return f"{name} {facts.became(snapshot.state)}"
    if snapshot.unwritten_s is not None:
        since = values.duration(snapshot.unwritten_s)
        return f"{name} is {snapshot.state}, but cannot write its database for {since}"
    if snapshot.stale_s is not None:
        return f"what is known of {name} is {values.duration(snapshot.stale_s)} old"
    if run.get("checkpoint_error"):
        return f"{name} is running, but its checkpoints fail: {run['checkpoint_error']}"
    return ""


def as_data(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Everybody who is not well, as JSON."""
    return [
        {
            "code": problem.code,
            "daemon": problem.daemon,
            "since": problem.since,
            "text": problem.text,
            "is_grave": problem.is_grave,
            "is_over": problem.is_over,
            **hints.as_data(problem.fix),
        }
        for problem in problems.found(snapshot)
    ]
