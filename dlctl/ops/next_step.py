"""What to do about a run that does not train: one answer, the same in every command."""

from __future__ import annotations

import re
import shlex
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.control import unresponsive
from dlctl.errors import DlctlError
from dlctl.ops import other_hosts, unreadable
from dlctl.runs import checkpoints, facts, lock, preferred, select
from dlctl.runs.database import RunDb
from dlctl.runs.manifest import has_updates, is_doubtful
from dlctl.runs.snapshot import Snapshot, newest_whole, read_job
from dlctl.settings import EVERY_RUN
from dlctl.util import hints, values
from dlctl.util.text import BLAMED, ENDED_BY_ITSELF, bounded_place, is_poisoned

if TYPE_CHECKING:
    from dlctl.ops.remains import Findings

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
    """Another way, see `dlctl.util.hints`."""

    def text(self) -> str:
        """A line each, as in "correct train.py:45 first, then", "dlctl recover -j x", "goes on at
        step 9"; see `dlctl.util.hints`.
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
        return Step(lock.where_to_look(snapshot.original), "says how the run is")
    if snapshot.silent_s is not None:
        return _of_silent(snapshot)
    if snapshot.is_live or snapshot.state not in ("failed", "stopped") or _is_outdated(snapshot):
        return None
    if snapshot.state == "stopped":
        return _start(snapshot)
    if is_poisoned(snapshot.reason):
        return step_of_ruined(snapshot)
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
    """As one types it."""
    file = snapshot.run.get("job_file")
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

    if is_ended_by_task(snapshot.reason):
        return mend_task(snapshot)
    has_worked = facts.has_begun(snapshot)
    was_killed = snapshot.reason.endswith(KILLED_FROM_OUTSIDE)
    has_said_why = bool(snapshot.reason) and not _PLACE.search(snapshot.reason) and not was_killed
    is_to_mend = begins and has_said_why and not has_worked and not snapshot.is_gone
    return "mend that" if is_to_mend else ""


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
        return Step(recover, f"goes on at step {step}: nothing is lost")
    if hosts := other_hosts.given_up(snapshot):
        back = f"goes on if {' and '.join(hosts)} can be reached again"
        return Step(recover, back, other=without(snapshot, hosts))
    if other_hosts.of(snapshot):
        return Step(recover, "asks the other hosts what is left there, and goes on with that")
    if facts.saved_step(snapshot) is None:
        return _start(snapshot) or Step(
            f"dlctl recover --dry-run -j {snapshot.run_id}", "says what is left of it"
        )
    return Step(recover, _goes_back(snapshot, left))


def _left(snapshot: Snapshot) -> Findings | None:
    """What is left of a run that has failed; None if it has done nothing that could be lost."""
    if not (snapshot.is_gone or facts.has_begun(snapshot)):
        return None
    from dlctl.ops import remains  # only here and below: it takes numpy along

    return remains.at_a_glance(snapshot)


def _goes_back(snapshot: Snapshot, left: Findings | None) -> str:
    """To its checkpoint, and what that costs, as `dlctl recover` will say."""
    from dlctl.ops import remains

    if left is None or not (cost := remains.cost_of_going_back(left)):
        return _from_checkpoint(snapshot)
    saved = values.count(facts.saved_step(snapshot))
    return f"goes on from the checkpoint at step {saved}; {cost}"


def _start(snapshot: Snapshot) -> Step | None:
    if not isinstance(snapshot.run.get("job_file"), str):
        return None
    if damaged := facts.all_damaged(snapshot):
        verify, anew = (
            f"dlctl checkpoint verify -j {snapshot.run_id}",
            unreadable.anew(job_file(snapshot)),
        )
        return Step(verify, f"says what is wrong: {damaged}", other=anew)
    again = f"dlctl start {job_file(snapshot)}"
    if facts.saved_step(snapshot) is None:
        return Step(again, "begins anew: there is no checkpoint to go on from")
    return Step(again, _from_checkpoint(snapshot))


def when_all_damaged(run_id: str, job_file: str) -> str:
    """The same commands for everybody who finds that; `job_file` as one types it."""
    return hints.either(f"dlctl checkpoint verify -j {run_id}", unreadable.anew(job_file))


def _from_checkpoint(snapshot: Snapshot) -> str:
    saved = values.count(facts.saved_step(snapshot))
    return f"goes on from the checkpoint at step {saved}{facts.done_again(snapshot)}"


# ---------------------------------------------------------------- a model that may be ruined
# Nobody could use what the workers computed: whoever goes on there fails again.


RUINED = "the model may be ruined where it stopped"
RATES = {"lr", "inner_lr"}
"""What ruins a model if it is too large."""
Json = dict[str, Any]


def is_ruined(snapshot: Snapshot) -> bool:
    return snapshot.state == "failed" and is_poisoned(snapshot.reason)


def has_way_back(snapshot: Snapshot) -> bool:
    """Whether it failed so, and there is a checkpoint of before that."""
    found = newest_whole(snapshot.directory) if is_ruined(snapshot) else None
    return found is not None and has_updates(found[1]) and not is_doubtful(found[1])


def step_of_ruined(snapshot: Snapshot) -> Step:
    """The next one, of a run that has failed so: a way that works."""
    found, anew = (
        newest_whole(snapshot.directory),
        f"dlctl start --fresh {_typed_job_file(snapshot)}",
    )
    first = _first_of_ruined(snapshot)
    if found is None or not has_updates(found[1]):
        return Step(anew, f"begins anew: {RUINED}, and there is no checkpoint", first)
    live = set_live(snapshot)
    forgets = f"; {live}: that is forgotten" if live else ""
    price = f"checkpoint {_named(found[1])}{facts.done_again(snapshot)}{forgets}"
    if is_doubtful(found[1]):
        what = f"goes on from {price}; the model may be ruined there: if it fails again, begin anew"
        return Step(_command_of_ruined(snapshot), what, first, anew)
    further = _further(snapshot, found[0])
    return Step(_command_of_ruined(snapshot), f"goes back to {price}; {RUINED}", first, further)


def _further(snapshot: Snapshot, path: Path) -> str:
    """How to go back further than to `path`, if the run came from there and has failed again: the
    model may have been ruined before that was saved. "" if it did not, or nothing older is whole.
    """
    if Path(str(snapshot.run.get("resume") or "")).name != path.name:
        return ""
    for older in preferred.order(snapshot.directory):
        is_older = checkpoints.number(older) < checkpoints.number(path)
        if is_older and not checkpoints.verify(older, hashes=False):
            made = checkpoints.read_manifest(older)
            back = f"dlctl recover -j {snapshot.run_id} --checkpoint {made['number']}"
            return hints.told(back, f"goes back further, to checkpoint {_named(made)}")
    return ""


def _first_of_ruined(snapshot: Snapshot) -> str:
    """What has to be done before; a rate that was set live is forgotten without that."""
    if _live(snapshot).keys() & RATES:
        return ""
    return f"correct the data or the task, or lower lr in {_typed_job_file(snapshot)},"


def _command_of_ruined(snapshot: Snapshot) -> str:
    """`start` takes a job file that has been changed; without any need for that, `recover` does."""
    if _live(snapshot).keys() & RATES or not isinstance(snapshot.run.get("job_file"), str):
        return f"dlctl recover -j {snapshot.run_id} --from-checkpoint"
    return f"dlctl start {_typed_job_file(snapshot)}"


def _typed_job_file(snapshot: Snapshot) -> str:
    return job_file(snapshot)


def _named(manifest: Mapping[str, Any]) -> str:
    """As in "1 (step 7,664, accuracy 0.9778)"."""
    metrics, step = manifest["evaluation"], manifest["step"]
    parts = [f"step {values.count(step)}"]
    parts += [values.evaluation_at(metrics, step)] if metrics else []
    return f"{manifest['number']} ({', '.join(parts)})"


# ---------------------------------------------------------------- what was set live


def set_live(snapshot: Snapshot) -> str:
    """What was set live and is still remembered, as in "lr=100000.0 was set live 3s before the
    end"; "" if nothing is.
    """
    live = _live(snapshot)
    if not live:
        return ""
    shown = " ".join(f"{key}={EVERY_RUN.format(key, value)}" for key, value in live.items())
    shown += " was set live"
    changed_at, ended_at = _changed_at(snapshot, live), values.number(snapshot.run.get("ended_at"))
    if changed_at is None or ended_at is None or changed_at > ended_at:
        return shown
    return f"{shown} {values.duration(ended_at - changed_at)} before the end"


def _live(snapshot: Snapshot) -> Json:
    """What the next coordinator puts in force again, unless it begins from a checkpoint."""
    found: Json = {}
    try:
        with closing(RunDb(snapshot.directory, readonly=True)) as db:
            rows = [row for key, row in db.memory().items() if key.startswith("daemon/")]
    except (DlctlError, sqlite3.Error, ValueError):
        return found
    for row in rows:
        found |= row.get("settings") or {}
    return found


def _changed_at(snapshot: Snapshot, live: Json) -> float | None:
    """When one of these was set last; None if nobody knows."""
    try:
        with closing(RunDb(snapshot.directory, readonly=True)) as db:
            events = list(db.events(kind="set"))
    except (DlctlError, sqlite3.Error, ValueError):
        return None
    words = [f" {key}=" for key in live]
    times = [row["at"] for row in events if any(word in str(row["text"]) for word in words)]
    return max(times, default=None)


# ---------------------------------------------------------------- faults of the task
# Faults of the task that dlctl cannot mend: a line that does not come back, and what ends the
# process without a word. Which line that is, and what to do then.


Row = Mapping[str, Any]


def is_stuck(row: Row) -> bool:
    """Whether a worker says itself that it has been in one batch for too long."""
    return "stuck_s" in facts.metrics(row)


def stuck_place(row: Row) -> str:
    """The line of the task that it is stuck in, as in "train.py:51"; "" if that is not known."""
    found = facts.metrics(row).get("stuck_at")
    if not is_stuck(row) or not isinstance(found, str) or not found:
        return ""
    file, colon, line = bounded_place(found).rpartition(":")
    return f"{values.path(file)}{colon}{line}" if file else line


def long_s(row: Row) -> float | None:
    """For how long it has been in a batch that takes longer than usual, which is no fault yet."""
    return values.number(facts.metrics(row).get("in_batch_s"))


def in_long_batches(snapshot: Snapshot) -> list[Row]:
    """The workers in such batches."""
    return [row for row in snapshot.daemons if long_s(row) is not None]


def step_of_stuck(snapshot: Snapshot, row: Row) -> str:
    """What helps a worker that is stuck. If others are at the same line, or there are no others, it
    is the line that has to be corrected: the next processes would come to it, too.
    """
    where, workers = stuck_place(row), _workers(snapshot)
    names = [str(other["name"]) for other in workers if stuck_place(other) == where]
    job = f"-j {snapshot.run_id}"
    if not where or (len(names) < 2 and len(workers) > 1):
        return f"dlctl restart {row['name']} {job}"
    whom = "'worker-*'" if len(names) == len(workers) > 1 else " ".join(names)
    return _after(snapshot, f"see why {where} does not come back, and correct it", whom)


def blame(last: Any) -> str:
    """How often in a row a process has ended like that, and whose doing it is: the rest of a
    sentence about its end, see `crash_loops.blame`.
    """
    found = last.get("blame") if isinstance(last, Mapping) else None
    return found if isinstance(found, str) else ""


def times_in_row(last: Any) -> int:
    """How often in a row processes of this worker have ended by themselves in the same way."""
    number = last.get("in_row") if isinstance(last, Mapping) else None
    return number if type(number) is int else 0


def step_of_ended(snapshot: Snapshot, row: Row) -> str:
    """What to do about a worker whose process the task has ended; "" if that is not what it was."""
    last = row.get("last_exit")
    if BLAMED not in blame(last) or not snapshot.is_live:
        return ""
    names = [
        str(other["name"])
        for other in _workers(snapshot)
        if BLAMED in blame(other.get("last_exit"))
    ]
    whom = "'worker-*'" if len(names) == len(_workers(snapshot)) > 1 else " ".join(names)
    return _after(snapshot, mend_task(snapshot), whom)


def mend_task(snapshot: Snapshot) -> str:
    """What has to be done about a task that ends its process."""
    return f"find what ends the process in {_task_file(snapshot)}, and correct it"


def is_ended_by_task(reason: str) -> bool:
    """Whether a run has failed of that."""
    return ENDED_BY_ITSELF in reason or BLAMED in reason


def _after(snapshot: Snapshot, first: str, whom: str) -> str:
    """The next processes on this machine read the task's file anew; other hosts have a copy of it,
    which they get when the run is started.
    """
    if other_hosts.of(snapshot):
        start = f"dlctl start {job_file(snapshot)}"
        return f"{first}, then\ndlctl stop -j {snapshot.run_id}\n{start}"
    return f"{first}, then\ndlctl restart {whom} -j {snapshot.run_id}"


def _workers(snapshot: Snapshot) -> list[Row]:
    return [row for row in snapshot.daemons if row.get("role") == "worker"]


def _task_file(snapshot: Snapshot) -> str:
    """As in "train.py"; "the task" if that is not known."""
    job = read_job(snapshot.directory).get("job")
    task = job.get("task") if isinstance(job, Mapping) else None
    file = task.rpartition(":")[0] if isinstance(task, str) else ""
    return shlex.quote(values.path(Path(file))) if file else "the task"
