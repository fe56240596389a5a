"""What `status` shows below its table: the problems, their last log lines, the next command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dlctl.cli.ui import console
from dlctl.ops import next_step, problem_texts, problems
from dlctl.problems import RUN, Problem
from dlctl.runs import facts
from dlctl.runs.facts import Row
from dlctl.runs.snapshot import Snapshot
from dlctl.util import processes, values
from dlctl.util.text import grave, is_first_line

LAST_LINES = 3


def lines(snapshot: Snapshot, rows: Sequence[Row], *, has_next: bool = True) -> list[str]:
    """The problems of these daemons and of the run, and the next step unless another line has it.
    The first line of `status` has the reason of an end; the same log lines are shown once.
    """
    chosen: dict[str, Row] = {RUN: {}, **{str(row["name"]): row for row in rows}}
    found = [
        problem
        for problem in problems.found(snapshot)
        if problem.daemon in chosen
        and problem_texts.level(problem) != "wait"
        and problem.code != "run-failed"  # The first line of `status` has it.
    ]
    step = next_step.of(snapshot) if has_next else None
    shown: list[str] = []
    quoted: list[list[str]] = []
    for problem, fix in with_fixes(snapshot, found):
        mark = console.style("!", fg="red") if problem_texts.level(problem) == "error" else "·"
        shown.append(f"{mark} {line(_without_reason(problem, snapshot), snapshot.now)}")
        words = _last_log_lines(problem, chosen[problem.daemon])
        shown += [f"       | {console.escape(word)}" for word in words if words not in quoted]
        quoted.append(words)
        is_shown_below = step is not None and step.command in fix
        if (
            fix
            and snapshot.is_live
            and problem_texts.level(problem) != "notice"
            and not is_shown_below
        ):
            shown.append(console.next_lines(fix, " " * 7))
    if there := [] if snapshot.is_live else processes.living(snapshot.daemons):
        left = [f"{row['name']} (pid {row['pid']})" for row in there]
        ends = f"to abandon the run, dlctl stop -j {snapshot.run_id} ends them"
        shown.append(console.fact("running", f"{', '.join(left)}; {ends}"))
    if snapshot.state == "failed" and not snapshot.is_live:
        shown.append(console.fact("why", f"dlctl logs --failed -j {snapshot.run_id}"))
    if step is not None:
        shown.append(console.next_lines(step.text(), "  ", "next        "))
    return shown


def _without_reason(problem: Problem, snapshot: Snapshot) -> Problem:
    """A problem without an error that is the reason of the run's end."""
    error = problem.facts.get("error")
    if snapshot.is_live or not isinstance(error, str) or error not in snapshot.reason:
        return problem
    return problem._replace(facts={k: v for k, v in problem.facts.items() if k != "error"})


def line(problem: Problem, now: float) -> str:
    """A problem and its code, which `dlctl explain` knows."""
    text = console.escape(problem_texts.text(problem, now))
    return text + console.style(f"  [{problem.code}]", dim=True)


def with_fixes(snapshot: Snapshot, found: Sequence[Problem]) -> Iterator[tuple[Problem, str]]:
    """Each with the command that helps; of consecutive equal commands only the last is kept."""
    fixes = [problems.fix(snapshot, problem) for problem in found]
    for problem, fix, after in zip(found, fixes, [*fixes, None][1:], strict=True):
        yield problem, "" if fix == after else fix


def _last_log_lines(problem: Problem, row: Row) -> list[str]:
    """The last log lines of the process with the problem, if it has exited."""
    last = row.get("last_exit")
    words = last.get("last_lines") if isinstance(last, Mapping) else None
    if not isinstance(words, list) or "exit" not in problem.facts:
        return []
    log_lines = [str(word) for word in words if not is_first_line(str(word))]
    return (grave(log_lines) or log_lines)[-LAST_LINES:]


def errors(snapshot: Snapshot) -> list[str]:
    """The texts of the problems that are errors, without the run's failure."""
    ill = [p for p in problems.found(snapshot) if problem_texts.level(p) == "error"]
    return [problem_texts.text(p, snapshot.now) for p in ill if p.code != "run-failed"]


def advice(snapshot: Snapshot) -> list[str]:
    """What the job file could have better, in its own words."""
    of_job = [p for p in problems.found(snapshot) if p.code == "rounds-few"]
    return [problem_texts.text(problem, snapshot.now) for problem in of_job]


def unwell(snapshot: Snapshot) -> str:
    """Why a run is unhealthy, in a sentence; "" if it is healthy."""
    if snapshot.silent_s is None and snapshot.state not in ("running", "checkpointing"):
        return f"{snapshot.run_id} {facts.became(snapshot.state)}"
    for problem in problems.found(snapshot):
        if problem_texts.level(problem) == "error" and problem.code != "heartbeat-late":
            return f"{snapshot.run_id}: {problem_texts.text(problem, snapshot.now)}"
    if snapshot.stale_s is not None:
        return f"the state of {snapshot.run_id} is {values.duration(snapshot.stale_s)} old"
    return ""
