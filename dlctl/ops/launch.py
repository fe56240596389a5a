"""From a job file to a run directory and its coordinator: the common part of `start` and `run`.

`cases.py` decides which run it becomes.
A failed start leaves nothing behind: no directory, no link, no process.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlctl.control import keys, prepared
from dlctl.errors import DlctlError, os_errors_as
from dlctl.ops import (
    cases,
    changes,
    control,
    graft,
    mirror,
    next_step,
    other_hosts,
    recover,
    stop,
)  # fmt: skip
from dlctl.ops.cases import Case, Start
from dlctl.ops.decide import Action
from dlctl.ops.mirror import Claimed
from dlctl.ops.recover import Launched, explained
from dlctl.records import manifest
from dlctl.runs import lineage, lock, paths, select
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import ENDED, Snapshot, load, read_job
from dlctl.runs.terms import OnDisk, TermLog
from dlctl.stores import addresses
from dlctl.util import notes, values
from dlctl.util.text import plural

if TYPE_CHECKING:
    from dlctl.runs.lineage import Good

OWN_DIRECTORY = "set run_dir in [job] to a directory that you own and can write to"


PENDING_S = 15.0
"""A run without a coordinator on record counts as never started before that."""


def launch_job(new: Start, *, fresh: bool, source: str | None = None) -> Launched:
    """Start the coordinator of a job, or find that there is nothing to start; its file identifies
    it, together with its name. `source`: a checkpoint for a new run to start from: its directory,
    or an address.

    Raises UsageError for a job that differs from its live run, TimedOut if another command does not
    finish starting it, and DlctlError if the run directory cannot be created, its path is no text,
    or the process cannot be started.
    """
    file = new.file
    beside = file.parent.resolve()
    for path in (beside, (beside / new.job.job.run_dir).resolve(), paths.runtime_dir()):
        # A byte that is not UTF-8, as in a path in Latin-1, is a surrogate.
        if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
            raise DlctlError(
                "this path is not UTF-8, so daemons cannot send it to each other",
                where=str(path),
                hint="rename the directory, or use one whose path is UTF-8",
            )
    mirror.check_weights(new.job)
    if source is None:
        return _launch(new, None, fresh=fresh, source="")
    parent = Path(os.path.abspath(file.parent / new.job.job.run_dir))
    with graft.taken(source, new.job, parent) as good:
        return _launch(new, good, fresh=True, source=source)


def _launch(new: Start, good: Good | None, *, fresh: bool, source: str) -> Launched:
    """good: the checkpoint for a new run, which is from `source`."""
    file = new.file
    with lock.starting(file):
        previous = cases.newest(file, new.job)
        if previous is not None:
            previous = control.awaited(previous, _is_pending, PENDING_S)
        cases.check_no_other(new, previous, fresh=fresh)
        case = replace(cases.of_start(previous, new, fresh=fresh), checkpoint=good)
        if case.run is None or not case.action.is_look:
            return _act(case, new, source)
        with lock.claimed(case.run.directory):
            # Another command may have recovered it by now: then it is already running.
            now = recover.settled(load(case.run.directory))
            return _act(cases.looked(cases.of_start(now, new, fresh=fresh)), new)


def launch_new(start: Start) -> Launched:
    """Start a new run of this job, whatever runs it has. Raises DlctlError as `launch`."""
    return _begin(start, None)


def _is_pending(run: Snapshot) -> bool:
    """Whether a run has no coordinator on record yet. The command that created it was killed: it
    held the lock that we hold now.
    """
    return run.is_live and run.run.get("pid") is None


def _act(case: Case, new: Start, source: str = "") -> Launched:
    """Perform the action and report it."""
    from dlctl.jobfile import summary

    if refusal := cases.refusal(case):
        raise refusal
    previous = case.run
    for problem in case.damaged:
        notes.warn(problem)
    if previous is not None and case.action in (Action.ALREADY_RUNNING, Action.OVER):
        notes.note(cases.headline(case))
        return Launched(previous.directory, None)
    notes.note(summary.of(new.job))
    good = case.checkpoint
    if good is not None and manifest.is_suspect(good[1]):
        number = good[1]["number"]
        notes.warn(f"checkpoint {number} was saved when the run failed: {next_step.RUINED}")
    if previous is None or case.action in (Action.BEGIN, Action.BEGIN_FROM):
        if previous is not None:
            _leave(case, previous)
            _discard_superseded(new, previous)
            if case.action is Action.BEGIN and not case.facts.fresh:
                _make_way(previous)
        return _begin(new, good, source)
    mirror.claim(previous.directory, new.job, [previous.run_id])
    if case.action is Action.CONTINUE:
        notes.note(cases.headline(case))
        return recover.continue_run(case)
    return _resume(case, previous, new)


def _leave(case: Case, previous: Snapshot) -> None:
    """Leave a run for a new one. Only its owner may discard the state its servers stored. Raises
    DlctlError if a coordinator is about to train it.
    """
    lock.refuse_unknown_coordinator(previous)
    if case.facts.fresh or case.action is Action.BEGIN_FROM:
        if held := stop.kept(previous):
            name = previous.run_id
            what = f"the stored state of {name} stays ({plural(held, 'shard')})"
            notes.note(f"{what}; dlctl stop --kill -j {name} discards it")
        return
    stop.clean_up(previous, 0.0)
    stop.remove_kept(previous)
    other_hosts.end(previous, 0.0, purge=True)
    name, state = previous.run_id, previous.state
    notes.note(f"{name} ({state}) has no checkpoint after step 0; starting a new run")


def _make_way(previous: Snapshot) -> None:
    """Remove a prepared run that ended before its first update, as in a pod that was evicted early:
    it begins again under the same name, and with the same key.
    """
    given = prepared.given()
    if given is not None and given.run == previous.run_id:
        shutil.rmtree(previous.directory)
        (paths.index_dir() / given.run).unlink(missing_ok=True)


def _discard_superseded(new: Start, previous: Snapshot) -> None:
    """Remove from this machine what the servers of dead runs of this job have stored: of those that
    a new run had superseded before. That of the previous one can still be recovered.
    """
    for run in select.of_job(select.job_file(new.file), new.job.job.name):
        is_dead = run.state in ENDED and not run.is_live and not stop.living(run)
        if run.run_id == previous.run_id or not is_dead or lock.has_unknown_coordinator(run):
            continue
        if held := stop.kept(run):
            with suppress(DlctlError), lock.claimed(run.directory):  # Else it is being recovered.
                stop.remove_kept(run)
                what = f"the stored state of {run.run_id} is removed ({plural(held, 'shard')})"
                notes.note(f"{what}: two later runs have superseded it")


# ---------------------------------------------------------------- its directory


def _begin(new: Start, good: Good | None, source: str = "") -> Launched:
    """A new run in a new directory; `good`: the checkpoint that it starts from, from the address
    `source` or a directory. Raises DlctlError unless we own the parent of run directories, or can
    create it.
    """
    parent = Path(os.path.abspath(new.file.parent / new.job.job.run_dir))
    if parent.is_symlink() and not parent.exists():
        raise DlctlError("the run directory is a dangling link", where=str(parent))
    parent = parent.resolve()  # A canonical path: the daemons of a run are found by it.
    if parent.exists():
        _check_owned(parent, 0)
    made_parent = not parent.exists()
    directory = _new_directory(parent, new.job.job.name)
    claimed = Claimed()
    try:
        with explained(directory), paths.held(directory):
            follows = [] if good is None else [str(good[1]["run_id"])]
            claimed = mirror.claim(directory, new.job, follows, source)
            _write_new(directory, new, good, claimed.highest, is_ours=addresses.is_like(source))
            return recover.start_coordinator(directory)
    except BaseException:
        with suppress(DlctlError):
            claimed.release()
        (paths.index_dir() / directory.name).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)
        if made_parent and not any(parent.iterdir()):
            parent.rmdir()
        raise


def _write_new(
    directory: Path, new: Start, good: Good | None, highest: int, *, is_ours: bool
) -> None:
    """highest: see `mirror.Claimed`; is_ours: the checkpoint is a download."""
    (directory / "logs").mkdir()
    recover.write(directory, recover.job_files(new))
    given = prepared.given()
    keys.renew(directory, given.key if given else None)
    copy = None if good is None else graft.copy(directory, good, new.job, is_ours=is_ours)
    with closing(RunDb(directory, create=True)) as db:
        db.put_run(**recover.first_row(directory, select.job_file(new.file), new.job, copy))
        if copy is not None:
            with closing(OnDisk(directory)) as file:
                TermLog(file, graft.terms(copy)).append()
            lineage.record(db, directory, copy, "", highest)
        db.commit()
    (directory / paths.UNFINISHED).unlink()
    if good is not None:
        step, run_id = values.count(good[1]["step"]), good[1]["run_id"]
        notes.note(f"a new run starts from the checkpoint of {run_id} at step {step}")
        if translation := graft.in_words(good, new.job):
            notes.note(translation)


def _resume(case: Case, previous: Snapshot, new: Start) -> Launched:
    """Reuse the directory, from a checkpoint, with the current job file."""
    directory = previous.directory
    notes.note(f"{cases.headline(case)}; --fresh starts a new run")
    if case.cost:
        notes.warn(case.cost)
    for change in case.changes:
        notes.note(f"changed: {change.text()}")
    _check_owned(directory)
    settings, dropped = changes.set_before(previous, read_job(directory), new.content)
    for setting in changes.settings_in_words(settings):
        notes.note(f"still set: {setting}; --fresh or a change of the job file drops it")
    for setting in changes.settings_in_words(dropped):
        notes.note(f"no longer set: {setting}; the job file takes precedence")
    return recover.resume(case, settings)


def _check_owned(directory: Path, *others: int) -> None:
    """Raises DlctlError for a directory of another user, who could swap it during a run, except
    for `others` (user ids).
    """
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (os.getuid(), *others):
        what = f"this is not a directory of yours (uid {info.st_uid})"
        raise DlctlError(what, where=str(directory), hint=OWN_DIRECTORY)


def _new_directory(parent: Path, name: str) -> Path:
    """<name>-<4 hexadecimal digits>, not used by any run of this user. Until it is complete it is
    marked unfinished and is not a run. A prepared run has its name already.
    """
    given = prepared.given()
    for _ in range(1000):
        directory = parent / (given.run if given else f"{name}-{secrets.token_hex(2)}")
        if not (directory.exists() or (paths.index_dir() / directory.name).is_symlink()):
            break
        if given:
            raise DlctlError(
                "the prepared run has begun before, and cannot be resumed",
                where=str(directory),
                hint=f"see dlctl logs --failed -j {given.run}; {prepared.AGAIN}",
            )
    with os_errors_as("cannot create a run directory", directory, OWN_DIRECTORY):
        directory.mkdir(mode=paths.PRIVATE, parents=True)
        (directory / paths.UNFINISHED).touch()
    return directory
