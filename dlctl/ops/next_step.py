"""What to do about a run that does not train: the same answer in every command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.control import unresponsive
from dlctl.ops import other_hosts, unreadable
from dlctl.problems import of_reason
from dlctl.runs import facts, lineage, select
from dlctl.runs.manifest import has_updates, is_doubtful
from dlctl.runs.snapshot import Snapshot, read_job
from dlctl.util import hints, values
from dlctl.util.text import is_poisoned

if TYPE_CHECKING:
    from dlctl.ops.remains import Findings


class Step(NamedTuple):
    command: str
    what: str
    """What it does, as the rest of a sentence that begins with the command."""
    first: str = ""
    """What has to be done before, or it fails again: "fix train.py:45"."""
    other: str = ""
    """An alternative, see `dlctl.util.hints`."""

    def text(self) -> str:
        """A line each, as in "fix train.py:45 first, then", "dlctl recover -j x", "resumes at
        step 9"; see `dlctl.util.hints`.
        """
        return hints.either(f"{self._before()}{hints.told(self.command, self.what)}", self.other)

    def hint(self) -> str:
        """`text` without what the command does."""
        return hints.either(f"{self._before()}{self.command}", self.other)

    def _before(self) -> str:
        return f"{self.first} first, then\n" if self.first else ""


def of(snapshot: Snapshot) -> Step | None:
    """The next step; None if the run trains, has finished, or was superseded by a newer run."""
    if snapshot.silent_s is not None:
        run = {**snapshot.run, "daemons": snapshot.daemons}
        return Step(*unresponsive.way(snapshot.directory, run))
    if snapshot.is_live or snapshot.state not in ("failed", "stopped") or _is_outdated(snapshot):
        return None
    if snapshot.state == "stopped":
        return _start(snapshot)
    if is_poisoned(snapshot.reason):
        return step_of_diverged(snapshot)
    step = _after_failure(snapshot)
    return step._replace(first=_fix(snapshot))


def command(snapshot: Snapshot) -> str:
    """The next step as the hint of an error."""
    step = of(snapshot)
    if step is None:
        return f"dlctl status -j {snapshot.run_id}"
    return step.hint()


def place_of_error(snapshot: Snapshot) -> str:
    """The line of the user's code where a run failed, as in "train.py:45"; "" if there is none, or
    if the file has changed since.
    """
    file, _, line = str(of_reason(snapshot.reason).get("place", "")).rpartition(":")
    beside_job = Path(str(snapshot.run.get("job_file") or "")).parent / file
    ended_at = values.number(snapshot.run.get("ended_at"))
    with suppress(OSError):
        if ended_at is not None and beside_job.stat().st_mtime > ended_at:
            return ""
    return f"{values.path(file)}:{line}" if file else ""


def job_file(snapshot: Snapshot) -> str:
    """As typed in a shell."""
    file = snapshot.run.get("job_file")
    return shlex.quote(values.path(file)) if isinstance(file, str) and file else "JOBFILE"


def without(snapshot: Snapshot, hosts: list[str]) -> str:
    """How to continue without lost hosts: "without: remove h2 from job.toml, then ..."."""
    start = _start(snapshot)
    then = start.text() if start else "dlctl start JOBFILE"
    return f"without: remove {' and '.join(hosts)} from {job_file(snapshot)}, then\n{then}"


def _fix(snapshot: Snapshot) -> str:
    if place := place_of_error(snapshot):
        return f"fix {place}"
    if of_reason(snapshot.reason).get("cause") == "task":
        return f"find what ends the process in {task_file(snapshot)} and fix it"
    return ""


def task_file(snapshot: Snapshot) -> str:
    """As in "train.py"; "the task" if the file is unknown."""
    job = read_job(snapshot.directory).get("job")
    task = job.get("task") if isinstance(job, Mapping) else None
    file = task.rpartition(":")[0] if isinstance(task, str) else ""
    return shlex.quote(values.path(file)) if file else "the task"


def _is_outdated(snapshot: Snapshot) -> bool:
    """Whether a newer run of the same job file has been started."""
    file = snapshot.run.get("job_file")
    if not isinstance(file, str):
        return False
    newest = select.of_job(file, str(snapshot.run.get("name")))[-1:]
    return [run.directory for run in newest] != [snapshot.directory.resolve()]


def _after_failure(snapshot: Snapshot) -> Step:
    recover, left = f"dlctl recover -j {snapshot.run_id}", _left(snapshot)
    if left is not None and left.loses_nothing:
        step = values.count(snapshot.run.get("step"))
        return Step(recover, f"resumes at step {step}: nothing is lost")
    if hosts := other_hosts.given_up(snapshot):
        back = f"resumes once {' and '.join(hosts)} can be reached again"
        return Step(recover, back, other=without(snapshot, hosts))
    if other_hosts.of(snapshot):
        return Step(recover, "asks the other hosts for their state and resumes from it")
    if facts.saved_step(snapshot) is None:
        return _start(snapshot) or Step(
            f"dlctl recover --dry-run -j {snapshot.run_id}", "shows what is left of it"
        )
    return Step(recover, _from_checkpoint(snapshot))


def _left(snapshot: Snapshot) -> Findings | None:
    """What is left of a failed run; None if it has done nothing that could be lost."""
    if not (snapshot.is_gone or facts.has_begun(snapshot)):
        return None
    from dlctl.ops import remains  # imported late: it pulls in numpy

    return remains.at_a_glance(snapshot)


def _start(snapshot: Snapshot) -> Step | None:
    if not isinstance(snapshot.run.get("job_file"), str):
        return None
    if damaged := facts.all_damaged(snapshot):
        verify, anew = (
            f"dlctl checkpoint verify -j {snapshot.run_id}",
            unreadable.anew(job_file(snapshot)),
        )
        return Step(verify, f"shows what is wrong: {damaged}", other=anew)
    again = f"dlctl start {job_file(snapshot)}"
    if facts.saved_step(snapshot) is None:
        return Step(again, "starts over: no checkpoint after step 0")
    return Step(again, _from_checkpoint(snapshot))


def _from_checkpoint(snapshot: Snapshot) -> str:
    saved = values.count(facts.saved_step(snapshot))
    return f"resumes from the checkpoint at step {saved}{facts.done_again(snapshot)}"


# ---------------------------------------------------------------- a model that may be ruined
# The workers' results were unusable: a run that resumes from there fails again.


RUINED = "the model may be ruined where it stopped"


def step_of_diverged(snapshot: Snapshot) -> Step:
    """The next step after such a failure: the user has to fix the cause first.
    `recover --from-checkpoint` discards a learning rate that was set live.
    """
    found, file = lineage.newest_good(snapshot.directory, hashes=False), job_file(snapshot)
    first = f"fix the data or the task, or lower lr in {file},"
    anew = f"dlctl start --fresh {file}"
    if found is None or not has_updates(found[1]):
        return Step(anew, f"starts over: {RUINED}, and no checkpoint after step 0", first)
    back, price = f"dlctl start {file}", f"{_named(found[1])}{facts.done_again(snapshot)}"
    if is_doubtful(found[1]):
        what = "the model may be ruined there: if it fails again, start over"
        return Step(back, f"resumes from checkpoint {price}; {what}", first, anew)
    forgets = f"dlctl recover -j {snapshot.run_id} --from-checkpoint\ndiscards values set live"
    return Step(back, f"rolls back to checkpoint {price}; {RUINED}", first, forgets)


def _named(manifest: Mapping[str, Any]) -> str:
    """As in "1 (step 7,664, accuracy 0.9778)"."""
    metrics, step = manifest["evaluation"], manifest["step"]
    parts = [f"step {values.count(step)}"]
    parts += [values.evaluation_at(metrics, step)] if metrics else []
    return f"{manifest['number']} ({', '.join(parts)})"
