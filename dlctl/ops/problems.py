"""The problems of a run: those that its coordinator has found, and what it cannot say itself.

`status`, `why`, `logs --failed` and every `--json` show these; `dlctl.ops.codes` has their words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dlctl import problems as values_of
from dlctl.control import unresponsive
from dlctl.ops import codes, disk, next_step, other_hosts
from dlctl.problems import Code, Problem, known, names_in
from dlctl.runs import facts, lock, paths
from dlctl.runs.facts import Row
from dlctl.runs.snapshot import (
    GONE,
    SILENT,
    WITHOUT_PROCESS,
    Snapshot,
    is_here,
    natural,
)
from dlctl.settings import EVERY_RUN
from dlctl.util import hints, values
from dlctl.util.names import COORDINATOR
from dlctl.util.text import KILLED

RECENT_S = 60.0
"""That a coordinator has taken another one's place is shown for so long."""
LASTING: Mapping[Code, Code] = {
    "checkpoint-failed": "checkpoint-failed",
    "daemon-failed": "daemon-failed",
    "daemon-quarantined": "daemon-quarantined",
    "daemon-restarting": "daemon-failed",
    "worker-crash-loop": "daemon-failed",
}
"""Problems that last when there is no coordinator any more -> what they are then."""


def found(snapshot: Snapshot) -> list[Problem]:
    """All problems of a run, the coordinator's first.

    While it is silent or cannot write, all that is known of the others is which processes are gone.
    """
    own, gone = [*_of_coordinator(snapshot)], [*_gone(snapshot)]
    if any(problem.code in ("coordinator-silent", "coordinator-unwritable") for problem in own):
        return [*own, *gone]
    told = {problem.daemon for problem in gone}
    recorded = [p for p in _recorded(snapshot) if p.daemon not in told]
    rest = sorted([*gone, *recorded], key=lambda problem: natural(problem.daemon))
    return [*own, *rest, *_disk(snapshot)]


def _recorded(snapshot: Snapshot) -> Iterator[Problem]:
    """What the coordinator has written last, as far as that is still true."""
    recorded = values_of.read(snapshot.run.get("problems"))
    if snapshot.is_live:
        is_current = snapshot.coordinator["state"] in ("running", "stopping")
        yield from (p for p in recorded if is_current and p.code != "coordinator-unwritable")
    elif snapshot.reason != KILLED:
        yield from (p._replace(code=LASTING[p.code]) for p in recorded if p.code in LASTING)
    if snapshot.state == "failed" and not snapshot.is_live and not snapshot.is_gone:
        said = known(reason=snapshot.reason, **values_of.of_reason(snapshot.reason))
        ended_at = values.number(snapshot.run.get("ended_at"))
        yield Problem("run-failed", values_of.RUN, ended_at, said)


def _gone(snapshot: Snapshot) -> Iterator[Problem]:
    """Daemons whose process is gone, which nobody has noted."""
    for row in snapshot.daemons:
        if row.get("state") == GONE:
            heard_at, number = values.number(row.get("updated_at")), facts.incarnation(row)
            said = known(pid=row.get("pid"), incarnation=number)
            yield Problem("process-gone", str(row["name"]), heard_at, said)


def _disk(snapshot: Snapshot) -> Iterator[Problem]:
    """Nobody waits for it yet, but whoever dies now will."""
    if snapshot.is_live and (full := disk.full_disk(snapshot)):
        said = {"cause": "full", "why": full, "folder": disk.folder(snapshot)}
        yield Problem("disk-full", values_of.RUN, None, said)


def still_there(snapshot: Snapshot) -> list[Row]:
    """Daemons whose processes are here; of those on other hosts nobody knows it."""
    rows = [row for row in snapshot.daemons if row.get("pid") is not None and is_here(row)]
    return [row for row in rows if row.get("state") not in (*WITHOUT_PROCESS, GONE)]


# ---------------------------------------------------------------- the coordinator


def _of_coordinator(snapshot: Snapshot) -> Iterator[Problem]:
    """It is silent, gone, cannot write, or has just taken the place of another one."""
    row = snapshot.coordinator
    number, heard_at = facts.incarnation(row), values.number(row.get("updated_at"))
    said: dict[str, Any] = {"incarnation": number}
    if row["state"] == SILENT:
        said["pid"] = snapshot.coordinator_pid
        if unresponsive.has_agent(snapshot.daemons):
            said["limit_s"] = paths.STILL_LIMITS * unresponsive.limit_s(snapshot.directory)
        since = snapshot.now - (snapshot.silent_s or 0.0)
        yield Problem("coordinator-silent", COORDINATOR, since, said)
    elif snapshot.unwritten_s is not None:
        said |= disk.facts(snapshot)
        yield Problem("coordinator-unwritable", COORDINATOR, heard_at, said)
    elif row["state"] == GONE and lock.has_unknown_coordinator(snapshot):
        if why := disk.facts(snapshot):
            said |= why
            yield Problem("coordinator-unwritable", COORDINATOR, heard_at, said)
        else:
            yield Problem("coordinator-restarting", COORDINATOR, heard_at, said)
    elif row["state"] == GONE:
        yield _absent(snapshot, heard_at, number)
    elif row["state"] == "starting" and snapshot.run.get("updated_by") is not None:
        said["incarnation"] = number - 1
        yield Problem("coordinator-restarting", COORDINATOR, heard_at, said)
    elif snapshot.is_live and number > 1:
        for last in facts.takeovers(snapshot.directory)[-1:]:
            if snapshot.now - last.at < RECENT_S:
                said = known(incarnation=number - 1, how=last.how, forgotten=last.forgotten)
                yield Problem("coordinator-restarted", COORDINATOR, last.at, said)


def _absent(snapshot: Snapshot, heard_at: float | None, number: int) -> Problem:
    """Of a coordinator that is gone, and whether there will be another one."""
    said: dict[str, Any] = {"incarnation": number}
    if not snapshot.is_live:
        said |= known(pid=snapshot.run.get("pid"))
    else:
        said |= {"pid": snapshot.run.get("pid"), "cause": "restarts", "agent": "its agent"}
        said |= disk.facts(snapshot)
    return Problem("coordinator-gone", COORDINATOR, _seen_at(snapshot, heard_at), said)


def _seen_at(snapshot: Snapshot, heard_at: float | None) -> float | None:
    """When there was the last sign of a coordinator that is gone; None if there never was.

    It goes on to touch its lock when it cannot write. Where not even that is possible the age of
    the lock is 0 (`paths.beat_age_s`), which is no sign.
    """
    beat_age_s = paths.beat_age_s(snapshot.directory, snapshot.now)
    signs = [heard_at, snapshot.now - beat_age_s if beat_age_s else None]
    return max((at for at in signs if at is not None), default=None)


# ---------------------------------------------------------------- what helps


def fix(snapshot: Snapshot, problem: Problem) -> str:
    """The command that helps, or tells more, as a hint; "" if there is nothing to do."""
    template = codes.fix(problem)
    shown = codes.shown(problem, snapshot.now) | {"run": snapshot.run_id}
    if "{next}" in template:
        step = next_step.of(snapshot)
        shown["next"] = step.text() if step is not None else ""
    if "{task}" in template or "{again}" in template:
        shown |= {"task": next_step.task_file(snapshot), "again": _again(snapshot, problem)}
    if "{job_file}" in template:
        shown["job_file"] = next_step.job_file(snapshot)
    if problem.code == "rate-limit":
        shown |= _raised(problem)
    return codes.fill(template, shown)


def _again(snapshot: Snapshot, problem: Problem) -> str:
    """The next processes on this machine read the task's file anew; other hosts have a copy of it,
    which they get when the run is started.
    """
    job = f"-j {snapshot.run_id}"
    if other_hosts.of(snapshot):
        return f"dlctl stop {job}\ndlctl start {next_step.job_file(snapshot)}"
    return f"dlctl restart {problem.facts.get('restart') or problem.daemon} {job}"


def _raised(problem: Problem) -> dict[str, str]:
    """Twice the limit, as `dlctl set` takes it."""
    limit = values.number(problem.facts.get("limit_bytes_per_s")) or 0.0
    direction = str(problem.facts.get("direction"))
    if direction not in ("push", "fetch"):
        return {}
    double = EVERY_RUN.format(direction, 2 * limit).replace(" ", "")
    return {"double": double, "each": " ".join(names_in(problem.facts.get("workers")))}


def as_data(snapshot: Snapshot, problem: Problem) -> dict[str, Any]:
    """A problem as JSON."""
    return {
        **problem.to_json(),
        "level": codes.level(problem),
        "text": codes.text(problem, snapshot.now),
        **hints.as_data(fix(snapshot, problem)),
    }


# ---------------------------------------------------------------- who waits for whom


class Cause(NamedTuple):
    """A problem, and those that wait for its daemon."""

    problem: Problem
    waiting: list[Cause]

    def names(self) -> Iterator[str]:
        """Its daemon, and all who wait for it."""
        facts = self.problem.facts
        yield from (self.problem.daemon, *names_in(facts.get("workers")))
        yield from names_in(facts.get("waiting"))
        for cause in self.waiting:
            yield from cause.names()


def forest(found: Sequence[Problem]) -> list[Cause]:
    """The problems as trees: the root causes, and below each who waits for it. Who waits for
    several stands below the first one.

    Of those who wait for each other in a ring, the first one is taken for the root.
    """
    waits = {problem.daemon: problem for problem in found if problem.code == "daemon-waiting"}
    causes = [problem for problem in found if problem.code != "daemon-waiting"]
    roots = [_tree(problem, waits) for problem in causes]
    told = {name for root in roots for name in root.names()}
    for name in [name for name in waits if name not in told]:
        if (problem := waits.pop(name, None)) is not None:
            roots.append(_tree(problem, waits))
    return roots


def _tree(problem: Problem, waits: dict[str, Problem]) -> Cause:
    """Takes those that it has out of `waits`."""
    here = [
        other
        for other in waits.values()
        if problem.daemon in names_in(other.facts.get("waiting_for"))
    ]
    for other in here:
        del waits[other.daemon]
    return Cause(problem, [_tree(other, waits) for other in here])
