"""What to do about a run that does not train: one answer, the same in every command."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dlctl.cli import belonging, knownruns, otherhosts, report, unreadable, values
from dlctl.cli.snapshot import Snapshot
from dlctl.control import unresponsive
from dlctl.util import hints
from dlctl.util.text import is_poisoned

if TYPE_CHECKING:
    from dlctl.cli.recovery import Findings

_OUTSIDE = re.compile(
    r"\b(ModuleNotFound|FileNotFound|NotADirectory|IsADirectory|Permission|OS|IO|BrokenPipe"
    r"|Connection\w*|Timeout|URL|HTTP|SSL|\w*Memory)Error\b"
)
"""What a line of code has met with, and is seldom to blame for."""
KILLED_FROM_OUTSIDE = ("killed by SIGKILL", "killed by SIGTERM")
"""How the reason ends of a run that somebody has ended: there is nothing to mend."""
_PLACE = re.compile(r"\(([^()\s][^()]*\.py:\d+)\)")


class Step(NamedTuple):
    command: str
    what: str
    """What it does, as the rest of a sentence that begins with the command."""
    first: str = ""
    """What has to be done before, or it fails again: "correct train.py:45"."""
    other: str = ""
    """Another way, see `ways`."""

    def text(self) -> str:
        """A line each, as in "correct train.py:45 first, then", "dlctl recover -j x", "goes on at
        step 9"; see `ways`.
        """
        return hints.either(f"{self._before()}{hints.told(self.command, self.what)}", self.other)

    def hint(self) -> str:
        """The same without what it does."""
        return hints.either(f"{self._before()}{self.command}", self.other)

    def _before(self) -> str:
        return f"{self.first} first, then\n" if self.first else ""


def of(snapshot: Snapshot) -> Step | None:
    """The next step; None if it trains, has finished, or a newer run has taken its place."""
    if snapshot.original is not None:
        return Step(belonging.where_to_look(snapshot.original), "says how the run is")
    if snapshot.silent_s is not None:
        return _of_silent(snapshot)
    if snapshot.is_live or snapshot.state not in ("failed", "stopped") or _is_outdated(snapshot):
        return None
    if snapshot.state == "stopped":
        return _start(snapshot)
    if is_poisoned(snapshot.reason):
        from dlctl.cli import doubtful  # only here: it needs `Step`

        return doubtful.step(snapshot)
    step = _after_failure(snapshot)
    return step._replace(first=_mend(snapshot, begins=step.command.startswith("dlctl start")))


def command(snapshot: Snapshot) -> str:
    """The next step as the hint of an error."""
    step = of(snapshot)
    if step is None:
        return f"dlctl status -j {snapshot.run_id}"
    return step.hint()


def place_of_error(snapshot: Snapshot) -> str:
    """The line of the user's code that a run has failed in, as in "train.py:45"; "" if in none, or
    if the file has been changed since.
    """
    found = _PLACE.findall(snapshot.reason)
    if not found:
        return ""
    file, _, line = found[-1].rpartition(":")
    ended_at = values.number(snapshot.run.get("ended_at"))
    with suppress(OSError):
        if ended_at is not None and _beside_job(snapshot, file).stat().st_mtime > ended_at:
            return ""
    return f"{values.path(file)}:{line}"


def mending(snapshot: Snapshot, place: str) -> str:
    """What to do about it: "correct train.py:45", if it can be the code that is wrong there."""
    is_outside = _OUTSIDE.search(snapshot.reason) is not None
    return f"mend what has failed at {place}" if is_outside else f"correct {place}"


def _beside_job(snapshot: Snapshot, file: str) -> Path:
    return Path(str(snapshot.run.get("job_file") or "")).parent / file


def job_file(snapshot: Snapshot) -> str:
    """As one types it; of a run that was moved with its project, the one beside it."""
    file = snapshot.run.get("job_file")
    if isinstance(file, str) and not os.path.lexists(file):
        from dlctl.cli import moved  # only here: it is hardly ever needed

        file = str(moved.beside(snapshot) or file)
    return shlex.quote(values.path(file)) if isinstance(file, str) and file else "JOBFILE"


def without(snapshot: Snapshot, hosts: list[str]) -> str:
    """How to do without hosts that are lost: as in "without: take h2 out of job.toml, then ..."."""
    start = _start(snapshot)
    then = start.text() if start else "dlctl start JOBFILE"
    return f"without: take {' and '.join(hosts)} out of {job_file(snapshot)}, then\n{then}"


def _of_silent(snapshot: Snapshot) -> Step:
    run = {**snapshot.run, "daemons": snapshot.daemons}
    return Step(*unresponsive.way(snapshot.directory, run))


def _mend(snapshot: Snapshot, *, begins: bool) -> str:
    """`begins`: the next step begins anew, and what kept it from beginning is still there."""
    if place := place_of_error(snapshot):
        return mending(snapshot, place)
    from dlctl.cli import taskfaults  # only here: it needs `job_file`

    if taskfaults.is_ended_by_task(snapshot.reason):
        return taskfaults.mend(snapshot)
    has_worked = report.has_begun(snapshot)
    was_killed = snapshot.reason.endswith(KILLED_FROM_OUTSIDE)
    has_said_why = bool(snapshot.reason) and not _PLACE.search(snapshot.reason) and not was_killed
    is_to_mend = begins and has_said_why and not has_worked and not snapshot.is_gone
    return "mend that" if is_to_mend else ""


def _is_outdated(snapshot: Snapshot) -> bool:
    """Whether a newer run of the same job file has been started."""
    file = snapshot.run.get("job_file")
    if not isinstance(file, str):
        return False
    newest = knownruns.of_job(file, str(snapshot.run.get("name")))[-1:]
    return [run.directory for run in newest] != [snapshot.directory.resolve()]


def _after_failure(snapshot: Snapshot) -> Step:
    recover, left = f"dlctl recover -j {snapshot.run_id}", _left(snapshot)
    if left is not None and left.loses_nothing:
        step = values.count(snapshot.run.get("step"))
        return Step(recover, f"goes on at step {step}: nothing is lost")
    if hosts := otherhosts.given_up(snapshot):
        back = f"goes on if {' and '.join(hosts)} can be reached again"
        return Step(recover, back, other=without(snapshot, hosts))
    if otherhosts.of(snapshot):
        return Step(recover, "asks the other hosts what is left there, and goes on with that")
    if report.saved_step(snapshot) is None:
        return _start(snapshot) or Step(
            f"dlctl recover --dry-run -j {snapshot.run_id}", "says what is left of it"
        )
    return Step(recover, _goes_back(snapshot, left))


def _left(snapshot: Snapshot) -> Findings | None:
    """What is left of a run that has failed; None if it has done nothing that could be lost."""
    if not (snapshot.is_gone or report.has_begun(snapshot)):
        return None
    from dlctl.cli import recovery  # only here and below: it takes numpy along

    return recovery.at_a_glance(snapshot)


def _goes_back(snapshot: Snapshot, left: Findings | None) -> str:
    """To its checkpoint, and what that costs, as `dlctl recover` will say."""
    from dlctl.cli import recovery

    if left is None or not (cost := recovery.cost_of_going_back(left)):
        return _from_checkpoint(snapshot)
    saved = values.count(report.saved_step(snapshot))
    return f"goes on from the checkpoint at step {saved}; {cost}"


def _start(snapshot: Snapshot) -> Step | None:
    if not isinstance(snapshot.run.get("job_file"), str):
        return None
    if newer := unreadable.newer(snapshot):
        recover = f"dlctl recover --dry-run -j {newer}"
        return Step(recover, "says what is left of a newer run of this job, which cannot be read")
    if damaged := report.all_damaged(snapshot):
        verify, anew = (
            f"dlctl checkpoint verify -j {snapshot.run_id}",
            unreadable.anew(job_file(snapshot)),
        )
        return Step(verify, f"says what is wrong: {damaged}", other=anew)
    again = f"dlctl start {job_file(snapshot)}"
    if report.saved_step(snapshot) is None:
        return Step(again, "begins anew: there is no checkpoint to go on from")
    return Step(again, _from_checkpoint(snapshot))


def when_all_damaged(run_id: str, job_file: str) -> str:
    """The same commands for everybody who finds that; `job_file` as one types it."""
    return hints.either(f"dlctl checkpoint verify -j {run_id}", unreadable.anew(job_file))


def _from_checkpoint(snapshot: Snapshot) -> str:
    saved = values.count(report.saved_step(snapshot))
    return f"goes on from the checkpoint at step {saved}{report.done_again(snapshot)}"
