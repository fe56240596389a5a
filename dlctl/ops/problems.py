"""The problems of a run: those that its coordinator recorded, and those it cannot report itself.

`status`, `why`, `logs --failed` and every `--json` show them; `dlctl.ops.problem_texts` has their
texts.
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dlctl import problems as values_of
from dlctl.control import unresponsive
from dlctl.ops import next_step, other_hosts, problem_texts
from dlctl.problems import Code, Problem, known, names_in
from dlctl.runs import facts, lock, paths
from dlctl.runs.snapshot import GONE, SILENT, Snapshot, natural
from dlctl.util import hints, values
from dlctl.util.names import COORDINATOR
from dlctl.util.text import KILLED

FULL_BYTES = 1_000_000
"""The least free space with which a run can write its state."""
RECENT_S = 60.0
"""How long the takeover by a new coordinator is shown."""
LASTING: Mapping[Code, Code] = {
    "checkpoint-failed": "checkpoint-failed",
    "mirror-behind": "mirror-behind",
    "mirror-refused": "mirror-refused",
    "daemon-failed": "daemon-failed",
    "daemon-quarantined": "daemon-quarantined",
    "daemon-restarting": "daemon-failed",
    "rounds-few": "rounds-few",
    "tracker-failed": "tracker-failed",
    "worker-crash-loop": "daemon-failed",
}
"""Problems that persist after the coordinator is gone -> their code then."""


def found(snapshot: Snapshot) -> list[Problem]:
    """All problems of a run, the coordinator's first.

    While the coordinator is silent or cannot write, only missing processes are known of the others.
    """
    own, gone = [*_of_coordinator(snapshot)], [*_gone(snapshot)]
    if any(problem.code in ("coordinator-silent", "coordinator-unwritable") for problem in own):
        return [*own, *gone]
    missing = {problem.daemon for problem in gone}
    recorded = [p for p in _recorded(snapshot) if p.daemon not in missing]
    rest = sorted([*gone, *recorded], key=lambda problem: natural(problem.daemon))
    # A full disk blocks no daemon yet, but a daemon that dies now cannot be restarted.
    full = _full(snapshot) if snapshot.is_live else {}
    disk = [Problem("disk-full", values_of.RUN, None, full)] if full else []
    return [*own, *rest, *disk]


def lines(snapshot: Snapshot) -> list[str]:
    """What is wrong with a run, a line each."""
    return [problem_texts.text(problem, snapshot.now) for problem in found(snapshot)]


def _recorded(snapshot: Snapshot) -> Iterator[Problem]:
    """What the coordinator wrote last, where that still holds."""
    recorded = values_of.read(snapshot.run.get("problems"))
    if snapshot.is_live:
        is_current = snapshot.coordinator["state"] in ("running", "stopping")
        yield from (p for p in recorded if is_current and p.code != "coordinator-unwritable")
    elif snapshot.reason != KILLED:
        yield from (p._replace(code=LASTING[p.code]) for p in recorded if p.code in LASTING)
    if snapshot.state == "failed" and not snapshot.is_live and not snapshot.is_gone:
        details = known(reason=snapshot.reason, **values_of.of_reason(snapshot.reason))
        ended_at = values.number(snapshot.run.get("ended_at"))
        yield Problem("run-failed", values_of.RUN, ended_at, details)


def _gone(snapshot: Snapshot) -> Iterator[Problem]:
    """Daemons whose process is gone without a record of its exit."""
    for row in snapshot.daemons:
        if row.get("state") == GONE:
            reported_at, number = values.number(row.get("updated_at")), facts.incarnation(row)
            details = known(pid=row.get("pid"), incarnation=number)
            yield Problem("process-gone", str(row["name"]), reported_at, details)


# ---------------------------------------------------------------- the coordinator


def _of_coordinator(snapshot: Snapshot) -> Iterator[Problem]:
    """The coordinator is silent, gone, cannot write, or has just replaced another one."""
    row, pid = snapshot.coordinator, snapshot.run.get("pid")
    number, reported_at = facts.incarnation(row), values.number(row.get("updated_at"))
    is_gone, is_stuck = row["state"] == GONE, snapshot.unwritten_s is not None
    full = _unwritable(snapshot) if is_gone or (snapshot.is_live and is_stuck) else {}

    def problem(code: Code, since: float | None, **details: Any) -> Problem:
        return Problem(code, COORDINATOR, since, known(**{"incarnation": number, **details}))

    if row["state"] == SILENT:
        limit_s = paths.STILL_LIMITS * unresponsive.limit_s(snapshot.directory)
        limit = {"limit_s": limit_s} if unresponsive.has_agent(snapshot.daemons) else {}
        since = snapshot.now - (snapshot.silent_s or 0.0)
        yield problem("coordinator-silent", since, pid=pid, **limit)
    elif is_stuck:
        yield problem("coordinator-unwritable", reported_at, **full)
    elif is_gone and lock.has_unknown_coordinator(snapshot):
        code: Code = "coordinator-unwritable" if full else "coordinator-restarting"
        yield problem(code, reported_at, **full)
    elif is_gone:
        agent = {"cause": "restarts", "agent": "its agent"} if snapshot.is_live else {}
        # One that cannot write still touches its lock. An age of 0 means that not even that works.
        beat_age_s = paths.beat_age_s(snapshot.directory, snapshot.now)
        signs = (reported_at, snapshot.now - beat_age_s if beat_age_s else None)
        seen_at = max(filter(None, signs), default=None)
        yield problem("coordinator-gone", seen_at, pid=pid, **agent | full)
    elif row["state"] == "starting" and snapshot.run.get("updated_by") is not None:
        yield problem("coordinator-restarting", reported_at, incarnation=number - 1)
    elif snapshot.is_live and number > 1:
        for at, details in facts.takeovers(snapshot.directory)[-1:]:
            if snapshot.now - at < RECENT_S:
                yield problem("coordinator-restarted", at, incarnation=number - 1, **details)


# ---------------------------------------------------------------- its disk


def _full(snapshot: Snapshot) -> dict[str, str]:
    """The facts of the problem that the disk is full; {} if there is room for the run's state."""
    try:
        free: float = shutil.disk_usage(snapshot.directory).free
    except OSError:
        free = math.inf
    why = f"has {values.size(free)} left"
    return _of_folder(snapshot, "full", why) if free < FULL_BYTES else {}


def _unwritable(snapshot: Snapshot) -> dict[str, str]:
    """Why nothing can be written in the run directory, as the facts of a problem; {} if it can."""
    why = paths.refusal(snapshot.directory)
    read_only = _of_folder(snapshot, "read-only", f"is not writable: {why}") if why else {}
    return _full(snapshot) or read_only


def _of_folder(snapshot: Snapshot, cause: str, why: str) -> dict[str, str]:
    folder = values.path(snapshot.directory.parent)
    return {"cause": cause, "why": f"{folder} {why}", "folder": shlex.quote(folder)}


# ---------------------------------------------------------------- fixes


def fix(snapshot: Snapshot, problem: Problem) -> str:
    """The command that fixes the problem or shows more, as a hint; "" if no action is needed."""
    fixes = problem_texts.CODES[problem.code].fixes
    template = fixes.get(str(problem.facts.get("cause")), fixes[""])
    shown = problem_texts.shown(problem, snapshot.now) | {"run": snapshot.run_id}
    if "{next}" in template:
        step = next_step.of(snapshot)
        shown["next"] = step.text() if step is not None else ""
    job, shown["job_file"] = f"-j {snapshot.run_id}", next_step.job_file(snapshot)
    if "{task}" in template or "{again}" in template:
        # New processes on this machine re-read the task's file; other hosts have a copy, which they
        # receive when the run starts.
        again = f"dlctl restart {problem.facts.get('restart') or problem.daemon} {job}"
        if other_hosts.have_copies(snapshot):
            again = f"dlctl stop {job}\ndlctl start {shown['job_file']}"
        shown |= {"task": next_step.task_file(snapshot), "again": again}
    return problem_texts.fill(template, shown)


def as_data(snapshot: Snapshot, problem: Problem) -> dict[str, Any]:
    """A problem as JSON."""
    return {
        **problem.to_json(),
        "level": problem_texts.level(problem),
        "text": problem_texts.text(problem, snapshot.now),
        **hints.as_data(fix(snapshot, problem)),
    }


# ---------------------------------------------------------------- which daemon waits for which


class Cause(NamedTuple):
    """A problem, and the daemons that wait for its daemon."""

    problem: Problem
    waiting: list[Cause]

    def names(self) -> Iterator[str]:
        """The problem's daemon, and all that wait for it."""
        facts = self.problem.facts
        yield from (self.problem.daemon, *names_in(facts.get("workers")))
        yield from names_in(facts.get("waiting"))
        for cause in self.waiting:
            yield from cause.names()


def forest(found: Sequence[Problem]) -> list[Cause]:
    """The problems as trees: the root causes, and below each the daemons that wait for it. A daemon
    that waits for several is listed below the first.

    In a cycle of waits, the first daemon is taken as the root.
    """
    waits = {problem.daemon: problem for problem in found if problem.code == "daemon-waiting"}
    roots = [_tree(problem, waits) for problem in found if problem.code != "daemon-waiting"]
    listed = {name for root in roots for name in root.names()}
    while left := [name for name in waits if name not in listed]:
        roots.append(_tree(waits.pop(left[0]), waits))
    return roots


def _tree(problem: Problem, waits: dict[str, Problem]) -> Cause:
    """Removes its nodes from `waits`."""
    whom = {name: names_in(other.facts.get("waiting_for")) for name, other in waits.items()}
    here = [waits.pop(name) for name, awaited in whom.items() if problem.daemon in awaited]
    return Cause(problem, [_tree(other, waits) for other in here])
