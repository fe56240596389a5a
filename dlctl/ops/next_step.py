"""What to do about a run that does not train: the same answer in every command."""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dlctl.control import unresponsive
from dlctl.errors import DlctlError
from dlctl.ops import other_hosts, problem_texts
from dlctl.problems import of_reason
from dlctl.records.manifest import Manifest, has_updates, is_suspect
from dlctl.runs import database, facts, lineage, lock, select
from dlctl.runs.snapshot import Snapshot, Unreadable, check_records, read_job
from dlctl.util import hints, values
from dlctl.util.text import is_poisoned, plural

RUINED = "the model may be ruined where it stopped"


class NextStep(NamedTuple):
    command: str
    what: str
    """The effect of the command, as the rest of a sentence that begins with it."""
    first: str = ""
    """What has to be done before, or it fails again: "fix train.py:45"."""
    other: str = ""
    """An alternative, see `dlctl.util.hints`."""

    def text(self) -> str:
        """A line each, as in "fix train.py:45 first, then", "dlctl recover -j x", "resumes at
        step 9"; see `dlctl.util.hints`.
        """
        before = f"{self.first} first, then\n" if self.first else ""
        return hints.either(before + hints.command(self.command, self.what), self.other)


def of(snapshot: Snapshot) -> NextStep | None:
    """The next step; None if the run trains, has finished, or was superseded by a newer run."""
    if snapshot.silent_s is not None:
        run = {**snapshot.run, "daemons": snapshot.daemons}
        return NextStep(*unresponsive.way(snapshot.directory, run))
    if snapshot.is_live or snapshot.state not in ("failed", "stopped") or _is_outdated(snapshot):
        return None
    if snapshot.state == "stopped":
        return _start(snapshot)
    if is_poisoned(snapshot.reason):
        return _of_diverged(snapshot)
    return _after_failure(snapshot)._replace(first=_fix(snapshot))


def command(snapshot: Snapshot) -> str:
    """The next step as the hint of an error."""
    step = of(snapshot)
    return f"dlctl status -j {snapshot.run_id}" if step is None else step.text()


def job_file(snapshot: Snapshot) -> str:
    """The job file, as typed in a shell."""
    file = snapshot.run.get("job_file")
    return shlex.quote(values.path(file)) if isinstance(file, str) and file else "JOBFILE"


def without(snapshot: Snapshot, hosts: list[str]) -> str:
    """How to continue without lost hosts: "without: remove h2 from job.toml, then ..."."""
    then = f"from {job_file(snapshot)}, then\n{_start(snapshot).text()}"
    weights = read_job(snapshot.directory).get("servers", {}).get("weights")
    also = " and the weights of its servers" if weights else ""
    return f"without: remove {' and '.join(hosts)}{also} {then}"


def _fix(snapshot: Snapshot) -> str:
    known = of_reason(snapshot.reason)
    if place := known.get("place"):
        return f"fix {problem_texts.place(str(place))}"
    if known.get("cause") == "task":
        return f"find what ends the process in {task_file(snapshot)} and fix it"
    return ""


def task_file(snapshot: Snapshot) -> str:
    """The file of the task, or the script, "train.py"; "the task" if the file is unknown."""
    job = read_job(snapshot.directory).get("job", {})
    file = str(job.get("script") or str(job.get("task", "")).rpartition(":")[0])
    return shlex.quote(values.path(file)) if file else "the task"


def _is_outdated(snapshot: Snapshot) -> bool:
    """Whether a newer run of the same job file has been started."""
    file = snapshot.run.get("job_file")
    if not isinstance(file, str):
        return False
    newest = select.of_job(file, str(snapshot.run.get("name")))[-1:]
    return [run.directory for run in newest] != [snapshot.directory.resolve()]


def _after_failure(snapshot: Snapshot) -> NextStep:
    recover, left = f"dlctl recover -j {snapshot.run_id}", None
    if snapshot.is_gone or facts.has_begun(snapshot):
        from dlctl.ops import remains  # imported late: it pulls in numpy

        with suppress(DlctlError):
            left = remains.examine(snapshot, ask_hosts=False)
    if left is not None and not left.obstacles and (snapshot.is_gone or left.has_updates):
        step = values.count(snapshot.run.get("step"))
        return NextStep(recover, f"resumes at step {step}: nothing is lost")
    if hosts := other_hosts.given_up(snapshot):
        back = f"resumes once {' and '.join(hosts)} can be reached again"
        return NextStep(recover, back, other=without(snapshot, hosts))
    if other_hosts.can_ask(snapshot):
        return NextStep(recover, "asks the other hosts for their state and resumes from it")
    return _start(snapshot, recover)


def _start(snapshot: Snapshot, command: str = "") -> NextStep:
    """The next step from its newest checkpoint: `command`, or `dlctl start`."""
    problems, file = list[str](), job_file(snapshot)
    found = lineage.newest_good(snapshot.directory, problems.append, hashes=False)
    start = f"dlctl start {file}"
    if found is not None and has_updates(found[1]):
        return NextStep(command or start, _from_checkpoint(snapshot, found[1]))
    if found is not None or not problems:
        return NextStep(start, "starts over: no checkpoint after step 0")
    what = "shows what is wrong: all of its checkpoints are damaged"
    return NextStep(f"dlctl checkpoint verify -j {snapshot.run_id}", what, other=_anew(file))


def _from_checkpoint(snapshot: Snapshot, manifest: Manifest) -> str:
    steps = facts.steps_after(snapshot, manifest["step"])
    again = f"; {plural(steps, 'step')} {'is' if steps == 1 else 'are'} done again" if steps else ""
    return f"resumes from the checkpoint at step {manifest['step']:,}{again}"


def _anew(file: str) -> str:
    return hints.command(f"dlctl start --fresh {file}", "starts over at step 0")


def _of_diverged(snapshot: Snapshot) -> NextStep:
    """The next step if the workers' results were unusable: a run that resumes where it stopped
    fails again, so the user has to fix the cause first.
    """
    found, file = lineage.newest_good(snapshot.directory, hashes=False), job_file(snapshot)
    first = f"fix the data or the task, or lower lr in {file},"
    if found is None or not has_updates(found[1]):
        what = f"starts over: {RUINED}, and no checkpoint after step 0"
        return NextStep(f"dlctl start --fresh {file}", what, first)
    what = f"{_from_checkpoint(snapshot, found[1])}; {RUINED}"
    other = f"dlctl recover -j {snapshot.run_id} --from-checkpoint\ndiscards values set live"
    if is_suspect(found[1]):  # There is no other: that one may be ruined too.
        other = f"dlctl start --fresh {file}"
    return NextStep(f"dlctl start {file}", what, first, other)


# ---------------------------------------------------------------- a run that cannot be resumed
# The database cannot be read, or the directory is a copy. The checkpoints are separate files, so a
# new run can start from the newest one.


def explained(error: Unreadable) -> Unreadable:
    """The error with the next command."""
    from dlctl.launch import local

    directory, text = error.directory, error.message
    typed, hint = shlex.quote(values.path(directory)), new_run(directory, _job_file_of(directory))
    snapshot = select.load_any(directory)
    if (found := lock.origin(snapshot)) is not None:
        text = f"this directory is a copy: {found[1]}"
        look = "dlctl status -j" if (found[0] / database.FILE).exists() else "pgrep -af"
        has_saved = lineage.newest_good(directory, hashes=False) is not None
        hint = hints.either(f"{look} {shlex.quote(str(found[0]))}", hint if has_saved else "")
    elif there := [found.name for found in local.living(directory)]:
        text += f"\n  daemons of it are alive: {', '.join(there)}"
        hint = hints.command(f"dlctl stop --kill -j {typed}", "ends them")
        if snapshot.coordinator_pid is not None:
            hint = hints.command(f"dlctl stop -j {typed}", "ends the run with a checkpoint")
    return Unreadable(directory, text, hint, is_copy=found is not None)


def new_run(directory: Path, job_file: str) -> str:
    """How to continue without the database; `job_file` as typed in a shell. Does not read the
    checkpoint's bytes: `start` does that.
    """
    found = lineage.newest_good(directory, hashes=False)
    if found is None:
        return _anew(job_file)
    path, step = shlex.quote(values.path(found[0])), values.count(found[1]["step"])
    return hints.command(f"dlctl start --from {path} {job_file}", f"resumes from step {step}")


def _job_file_of(directory: Path) -> str:
    """The job file in a shell: the one beside the runs that equals the run's, or the only one."""
    files = sorted(directory.resolve().parents[1].glob("*.toml"))
    same = [file for file in files if select.is_started_from(directory, file)] or files
    return shlex.quote(values.path(same[0])) if len(same) == 1 else "JOBFILE"


def damaged(words: Iterable[str], error: Exception) -> DlctlError | None:
    """The error for a command that hit a damaged page of a database: which run, and the next
    command; None if no run is damaged. `words`: of its command line, which may name the run.
    """
    if not isinstance(error, sqlite3.DatabaseError):
        return None
    named, known = set(words), select.directories()[::-1]
    for directory in sorted(known, key=lambda path: path.name not in named):
        try:
            check_records(directory)
        except Unreadable as found:
            return explained(found)
    return None
