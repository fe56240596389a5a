"""From a job file to a run directory and its coordinator; what `start` and `run` have in common.

Which run it becomes is decided in `deciding.py`.
If anything goes wrong on the way, nothing is left: no directory, no link, no process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.cli import (
    belonging,
    changes,
    console,
    deciding,
    grafting,
    kept,
    knownruns,
    lineage,
    moved,
    onlyone,
    otherhosts,
    stop,
    unfinished,
    values,
)
from dlctl.cli.deciding import Decision
from dlctl.cli.snapshot import Snapshot, load
from dlctl.control import keys
from dlctl.errors import DlctlError
from dlctl.runs import checkpoints, paths, task_code
from dlctl.runs.database import RunDb

if TYPE_CHECKING:
    import subprocess

    from dlctl.cli.recovery import Findings
    from dlctl.cli.resuming import Good
    from dlctl.config import JobFile

POLL_S = 0.05
BEGUN_S = 2.0
"""For a coordinator that was started by a killed command to say that it is there."""
Json = dict[str, Any]


class Launched(NamedTuple):
    directory: Path
    process: subprocess.Popen[bytes] | None
    """The coordinator; None if nothing had to be started."""
    goes_on: bool = False
    """The run goes on where it was; otherwise it begins, or resumes from a checkpoint."""


def launch(file: Path, *, fresh: bool, source: Path | None = None) -> Launched:
    """Start the coordinator of a job, or find out that there is nothing to start. `source`: of a
    checkpoint that a new run is to begin with.

    Raises UsageError for a job file that is not valid or differs from its run that still lives,
    TimedOut if another command does not come to an end of starting it, and DlctlError if the run
    directory cannot be made, its path is no text, or the process cannot be started.
    """
    from dlctl import config, jobfile
    from dlctl.cli.validate import summary

    job = jobfile.load(file)
    beside = file.parent.resolve()
    for path in (beside, (beside / job.job.run_dir).resolve(), paths.runtime_dir()):
        paths.check_text(path)
    content: Json = json.loads(json.dumps(config.to_dict(job)))
    graft = None if source is None else grafting.check(source, job)
    fresh = fresh or graft is not None
    with onlyone.starting(file):
        previous = _begun(deciding.to_go_on_from(file, job, fresh=fresh))
        decision = deciding.at_first(previous, file, content, fresh=fresh)
        if refusal := deciding.refusal(decision):
            raise refusal
        if previous is None and graft is None and (told := moved.not_used(file, job)):
            console.warn(console.escape(told))
        if previous is not None and decision.way != deciding.BEGIN:
            previous = _taken_over(previous, file)
            decision = dataclasses.replace(decision, previous=previous)
        if previous is not None and decision.way in (deciding.ALIVE, deciding.FINISHED):
            _tell_nothing_to_start(decision.way, previous)
            return Launched(previous.directory, None)
        if previous is None or decision.way == deciding.BEGIN:
            console.note(f"{console.escape(summary(job))}")
            if previous is not None:
                kept.name_what_stays(previous)
            return _begin(file, job, content, graft)
        with belonging.claimed(previous.directory):
            return _again(decision, previous, file, job, content, summary(job))


def _again(
    decision: Decision, previous: Snapshot, file: Path, job: JobFile, content: Json, head: str
) -> Launched:
    """Go on with a run that has ended, or has died; a new one if nothing is left of it."""
    from dlctl.cli import recovering, resuming

    belonging.check(previous)
    now = recovering.wait_over(load(previous.directory))
    if belonging.has_unknown_coordinator(now):
        now = recovering.wait_led(now)
    if now.is_live and now.run.get("pid") is not None:
        console.note(f"{console.escape(now.run_id)} has just been brought back")
        return Launched(now.directory, None)
    decision = deciding.examined(decision)
    if refusal := deciding.refusal(decision):
        raise refusal
    findings = decision.findings
    if findings is not None and decision.way == deciding.GO_ON:
        console.note(console.escape(head))
        _tell_that_it_goes_on(previous, findings)
        return recovering.go_on(findings)
    decision = deciding.with_checkpoint(decision, job, file)
    if refusal := deciding.refusal(decision):
        raise refusal
    resuming.warn_of_loss(decision)
    stop.clean_up(previous, stop.EXIT_S)
    resuming.tell(decision)
    console.note(console.escape(head))
    if decision.checkpoint is None:
        otherhosts.end(previous, 0.0, purge=True)
        return _begin(file, job, content)
    price = resuming.cost(decision, decision.checkpoint)
    return _resume(previous, file, job, content, decision.checkpoint[0], price)


# ---------------------------------------------------------------- what was there before


def _begun(previous: Snapshot | None) -> Snapshot | None:
    """The same, unless the command that started it was killed before there was a coordinator.

    It held the lock that we have now, so nobody starts it any more. What never was a run is
    removed; one that was being resumed is taken for stopped. Its coordinator may be there, and only
    slow to say so.
    """
    from dlctl.launch import local

    deadline = time.monotonic() + BEGUN_S
    while previous is not None and previous.run.get("pid") is None and previous.is_live:
        if time.monotonic() > deadline and not any(local.living(previous.directory)):
            if not checkpoints.complete(previous.directory):
                _remove(previous.directory, made_parent=False)
                return None
            return dataclasses.replace(previous, state="stopped", is_live=False)
        time.sleep(POLL_S)
        previous = load(previous.directory)
    return previous


def _taken_over(previous: Snapshot, file: Path) -> Snapshot:
    """The same; one that came here with its job file belongs to that from now on."""
    if not moved.of_another_place(previous, file):
        return previous
    with belonging.claimed(previous.directory):
        return take_over(previous, file)


def take_over(run: Snapshot, file: Path) -> Snapshot:
    """Have a run that was moved with its project belong to this job file, and say so.

    Raises DlctlError if it cannot be written.
    """
    with explained(run.directory):
        moved.take_over(run, file)
    told = f"{run.run_id} {moved.made_for(run)}: it belongs to {values.path(file)} now"
    console.note(console.escape(told))
    return load(run.directory)


def _tell_nothing_to_start(way: str, previous: Snapshot) -> None:
    name = console.escape(previous.run_id)
    if way == deciding.ALIVE:
        console.note(f"{name} is already {console.escape(previous.state)}")
        return
    console.note(
        f"{name} has finished already; to train anew: --fresh, to train on: change stop in [job]"
    )


def _tell_that_it_goes_on(previous: Snapshot, findings: Findings) -> None:
    from dlctl.cli import nextstep

    name, step = console.escape(previous.run_id), values.count(findings.step)
    console.note(f"{name} goes on where it was, at step {step}: nothing is lost")
    if place := nextstep.place_of_error(previous):
        console.warn(f"it failed in {place}, and will fail again until that is corrected")


# ---------------------------------------------------------------- its directory


def _begin(file: Path, job: JobFile, content: Json, graft: Good | None = None) -> Launched:
    """A new run in a new directory; `graft`: the checkpoint that it begins with."""
    parent = _run_dir(file, job)
    made_parent = not parent.exists()
    unfinished.sweep(parent, job.job.name)
    with _new_directory(parent, job.job.name) as directory:
        try:
            with explained(directory):
                _write_new(directory, file, job, content, graft)
                paths.socket_address(directory.name, "coordinator")
                paths.register(directory)
                return Launched(directory, start_coordinator(directory))
        except BaseException:
            _remove(directory, made_parent)
            raise


def _resume(
    previous: Snapshot, file: Path, job: JobFile, content: Json, checkpoint: Path, price: str
) -> Launched:
    """The same directory again, from a checkpoint. On failure its files are as they were; if not
    even its database could be written, its shards are still there, too, here and on other hosts.

    `price` goes into the run's events: what is lost by that, and why.
    """
    directory = previous.directory
    _check_owned(directory)
    settings = changes.still_set(previous, moved.read_job(previous, file), content)
    row = _row(directory, knownruns.job_file(file), job, resume=str(checkpoint))
    row["settings"] = settings
    for told in changes.set_otherwise(settings, content):
        console.note(console.escape(f"still set: {told}; --fresh or the job file drops it"))
    with explained(directory):
        before = {name: (directory / name).read_bytes() for name in ("job.toml", "job.json")}
        with closing(RunDb(directory)) as db:
            db.put_run(**row)
            lineage.record(db, directory, checkpoint, price)
            db.clear_memory()
            db.commit()
    try:
        with explained(directory):
            give_up_shards(previous)
            _write_job(directory, file, content)
            paths.socket_address(directory.name, "coordinator")
            paths.register(directory)
            return Launched(directory, start_coordinator(directory))
    except BaseException:
        with explained(directory):
            for name, data in before.items():
                paths.write(directory / name, data, moved.JOB_MODE)
            with closing(RunDb(directory)) as db:
                db.put_run(**{key: previous.run.get(key) for key in row})
                db.commit()
        raise


def give_up_shards(previous: Snapshot) -> None:
    """Remove what came after the checkpoint that a run goes back to, on all of its hosts.

    Its old job says where that is. No coordinator must be there: its agents would be ended, too.
    """
    kept.remove(previous)
    otherhosts.end(previous, 0.0, purge=True)


def _run_dir(file: Path, job: JobFile) -> Path:
    """Where run directories are made. Raises DlctlError unless it is, or can be made, ours."""
    parent = Path(os.path.abspath(file.parent / job.job.run_dir))
    if parent.is_symlink() and not parent.exists():
        raise DlctlError("the run directory is a link to nowhere", where=str(parent))
    if parent.exists():
        _check_owned(parent.resolve(), (os.getuid(), 0))
    return parent.resolve()  # One spelling for all: by it the daemons of a run are found again.


def _check_owned(directory: Path, owners: tuple[int, ...] | None = None) -> None:
    """A directory of somebody else's may be swapped under our feet."""
    info = directory.lstat()
    if not directory.is_dir() or directory.is_symlink():
        raise DlctlError("this is not a directory", where=str(directory))
    if info.st_uid not in (owners or (os.getuid(),)):
        raise DlctlError(
            f"this directory belongs to somebody else (uid {info.st_uid})",
            where=str(directory),
            hint="set run_dir in [job] to a directory of yours",
        )


@contextmanager
def _new_directory(parent: Path, name: str) -> Iterator[Path]:
    """<name>-<4 hexadecimal digits>, unknown so far to this user; while we are here, it is ours."""
    index = paths.index_dir()
    with ExitStack() as ours:
        for _ in range(1000):
            directory = parent / f"{name}-{secrets.token_hex(2)}"
            if (index / directory.name).is_symlink():
                continue
            try:
                ours.enter_context(unfinished.made(directory))
                break
            except (FileExistsError, BlockingIOError):
                continue
            except OSError as error:
                raise DlctlError(
                    f"cannot make a run directory: {error.strerror}",
                    where=str(directory),
                    hint="set run_dir in [job] to a directory that you can write to",
                ) from error
        else:
            raise DlctlError("there are too many runs of this name", where=str(parent))
        yield directory


def _write_new(
    directory: Path, file: Path, job: JobFile, content: Json, graft: Good | None
) -> None:
    (directory / unfinished.LOGS).mkdir()
    _write_job(directory, file, content)
    keys.renew(directory)
    copy = None if graft is None else grafting.copy(directory, graft)
    with closing(RunDb(directory, create=True)) as db:
        db.put_run(**_row(directory, knownruns.job_file(file), job, resume=str(copy or "")))
        if copy is not None:
            grafting.record(db, directory, copy)
        db.commit()
    unfinished.unmark(directory)
    if graft is not None:
        grafting.tell(graft)


def _write_job(directory: Path, file: Path, content: Json) -> None:
    paths.write(directory / "job.toml", file.read_bytes(), moved.JOB_MODE)
    paths.write(directory / "job.json", json.dumps(content, indent=1).encode(), moved.JOB_MODE)


def resume_keys(previous: Snapshot, resume: str) -> Json:
    """The same for a run that goes on from the checkpoint `resume`, with its job as it was."""
    from dlctl.cli import remains

    job_file = str(previous.run.get("job_file") or "")
    job = remains.read_jobfile(previous.directory)
    return _row(previous.directory, job_file, job, resume)


def _row(directory: Path, job_file: str, job: JobFile, resume: str) -> Json:
    """What the database says before the coordinator has written anything."""
    return {
        "run_id": directory.name,
        "name": job.job.name,
        "job_file": job_file,
        "place": belonging.place(directory),
        "algorithm": job.algorithm.name,
        "state": "pending",
        "reason": "",
        "waiting": "",
        "resume": resume,
        **dict.fromkeys(("pid", "pid_start", "control", "control_key")),
        **dict.fromkeys(("started_at", "ready_at", "ended_at", "updated_at")),
    }


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """What the operating system or the database refuses becomes an error that says where."""
    try:
        yield
    except OSError as error:
        where, reason = str(error.filename or directory), error.strerror or str(error)
        raise DlctlError(
            f"cannot write the run: {reason}", where=where, hint=f"df -h {directory.parent}"
        ) from error
    except sqlite3.Error as error:
        raise DlctlError(
            f"cannot write the run's database: {error}",
            where=str(directory),
            hint=f"df -h {directory.parent}",
        ) from error


def _remove(directory: Path, made_parent: bool) -> None:
    link = paths.index_dir() / directory.name
    if link.is_symlink():
        link.unlink()
    shutil.rmtree(directory, ignore_errors=True)
    if made_parent and not any(directory.parent.iterdir()):
        directory.parent.rmdir()


def start_coordinator(directory: Path) -> subprocess.Popen[bytes]:
    """Start the coordinator of a prepared run directory. Unless daemons of the run live, the task's
    files are what they are now. Raises DlctlError or OSError.
    """
    from dlctl.launch import local

    if (directory / task_code.CODE).exists() and not any(local.living(directory)):
        task_code.forget(directory)
    return local.start_coordinator(directory)
