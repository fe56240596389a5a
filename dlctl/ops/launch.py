"""From a job file to a run directory and its coordinator; what `start` and `run` have in common.

Which run it becomes is decided in `decide.py`.
If anything goes wrong on the way, nothing is left: no directory, no link, no process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dlctl.control import keys
from dlctl.errors import DlctlError, UsageError
from dlctl.ops import decide, kept, other_hosts, run_directory, stop
from dlctl.ops.decide import Decision
from dlctl.runs import checkpoints, lineage, lock, paths, select, unfinished
from dlctl.runs.database import RunDb
from dlctl.runs.manifest import MANIFEST, Manifest, is_doubtful, parts
from dlctl.runs.snapshot import Snapshot, load, read_job
from dlctl.util import notes, values

if TYPE_CHECKING:
    from dlctl.config import JobFile
    from dlctl.ops.decide import Good
    from dlctl.ops.remains import Findings

POLL_S = 0.05
BEGUN_S = 2.0
"""For a coordinator that was started by a killed command to say that it is there."""
Json = dict[str, Any]


def launch(file: Path, *, fresh: bool, source: Path | None = None) -> run_directory.Launched:
    """Start the coordinator of a job, or find out that there is nothing to start. `source`: of a
    checkpoint that a new run is to begin with.

    Raises UsageError for a job file that is not valid or differs from its run that still lives,
    TimedOut if another command does not come to an end of starting it, and DlctlError if the run
    directory cannot be made, its path is no text, or the process cannot be started.
    """
    from dlctl import config, jobfile
    from dlctl.jobfile import summary

    job = jobfile.load(file)
    beside = file.parent.resolve()
    for path in (beside, (beside / job.job.run_dir).resolve(), paths.runtime_dir()):
        paths.check_text(path)
    content: Json = json.loads(json.dumps(config.to_dict(job)))
    graft = None if source is None else check_source(source, job)
    fresh = fresh or graft is not None
    with lock.starting(file):
        previous = _begun(decide.to_go_on_from(file, job, fresh=fresh))
        decision = decide.at_first(previous, file, content, fresh=fresh)
        if refusal := decide.refusal(decision):
            raise refusal
        if previous is not None and decision.way in (decide.ALIVE, decide.FINISHED):
            _tell_nothing_to_start(decision.way, previous)
            return run_directory.Launched(previous.directory, None)
        if previous is None or decision.way == decide.BEGIN:
            notes.note(f"{summary.of(job)}")
            if previous is not None:
                kept.name_what_stays(previous)
            return _begin(file, job, content, graft)
        with lock.claimed(previous.directory):
            return _again(decision, previous, file, job, content, summary.of(job))


def _again(
    decision: Decision, previous: Snapshot, file: Path, job: JobFile, content: Json, head: str
) -> run_directory.Launched:
    """Go on with a run that has ended, or has died; a new one if nothing is left of it."""
    from dlctl.ops import decide, recover

    lock.check(previous)
    now = recover.wait_over(load(previous.directory))
    if lock.has_unknown_coordinator(now):
        now = recover.wait_led(now)
    if now.is_live and now.run.get("pid") is not None:
        notes.note(f"{now.run_id} has just been brought back")
        return run_directory.Launched(now.directory, None)
    decision = decide.examined(decision)
    if refusal := decide.refusal(decision):
        raise refusal
    findings = decision.findings
    if findings is not None and decision.way == decide.GO_ON:
        notes.note(head)
        _tell_that_it_goes_on(previous, findings)
        return recover.go_on(findings)
    decision = decide.with_checkpoint(decision, job, file)
    if refusal := decide.refusal(decision):
        raise refusal
    decide.warn_of_loss(decision)
    if decision.way == decide.BEGIN_FROM:
        decide.warn_of_damage(decision)
        notes.note(head)
        kept.name_what_stays(previous)
        return _begin(file, job, content, decision.checkpoint)
    stop.clean_up(previous, stop.EXIT_S)
    decide.tell(decision)
    notes.note(head)
    if decision.checkpoint is None:
        other_hosts.end(previous, 0.0, purge=True)
        return _begin(file, job, content)
    price = decide.cost(decision, decision.checkpoint)
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


def _tell_nothing_to_start(way: str, previous: Snapshot) -> None:
    name = previous.run_id
    if way == decide.ALIVE:
        notes.note(f"{name} is already {previous.state}")
        return
    notes.note(
        f"{name} has finished already; to train anew: --fresh, to train on: change stop in [job]"
    )


def _tell_that_it_goes_on(previous: Snapshot, findings: Findings) -> None:
    from dlctl.ops import next_step

    name, step = previous.run_id, values.count(findings.step)
    notes.note(f"{name} goes on where it was, at step {step}: nothing is lost")
    if place := next_step.place_of_error(previous):
        notes.warn(f"it failed in {place}, and will fail again until that is corrected")


# ---------------------------------------------------------------- its directory


def _begin(
    file: Path, job: JobFile, content: Json, graft: Good | None = None
) -> run_directory.Launched:
    """A new run in a new directory; `graft`: the checkpoint that it begins with."""
    parent = _run_dir(file, job)
    made_parent = not parent.exists()
    unfinished.sweep(parent, job.job.name)
    with _new_directory(parent, job.job.name) as directory:
        try:
            with run_directory.explained(directory):
                _write_new(directory, file, job, content, graft)
                paths.socket_address(directory.name, "coordinator")
                paths.register(directory)
                return run_directory.Launched(directory, run_directory.start_coordinator(directory))
        except BaseException:
            _remove(directory, made_parent)
            raise


def _resume(
    previous: Snapshot, file: Path, job: JobFile, content: Json, checkpoint: Path, price: str
) -> run_directory.Launched:
    """The same directory again, from a checkpoint. On failure its files are as they were; if not
    even its database could be written, its shards are still there, too, here and on other hosts.

    `price` goes into the run's events: what is lost by that, and why.
    """
    directory = previous.directory
    _check_owned(directory)
    settings = decide.still_set(previous, read_job(previous.directory), content)
    row = run_directory.first_row(directory, select.job_file(file), job, resume=str(checkpoint))
    row["settings"] = settings
    for told in decide.set_otherwise(settings, content):
        notes.note(f"still set: {told}; --fresh or the job file drops it")
    with run_directory.explained(directory):
        before = {name: (directory / name).read_bytes() for name in ("job.toml", "job.json")}
        with closing(RunDb(directory)) as db:
            db.put_run(**row)
            lineage.record(db, directory, checkpoint, price)
            db.clear_memory()
            db.commit()
    try:
        with run_directory.explained(directory):
            run_directory.give_up_shards(previous)
            _write_job(directory, file, content)
            paths.socket_address(directory.name, "coordinator")
            paths.register(directory)
            return run_directory.Launched(directory, run_directory.start_coordinator(directory))
    except BaseException:
        with run_directory.explained(directory):
            for name, data in before.items():
                paths.write(directory / name, data, run_directory.JOB_MODE)
            with closing(RunDb(directory)) as db:
                db.put_run(**{key: previous.run.get(key) for key in row})
                db.commit()
        raise


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
    copy = None if graft is None else copy_source(directory, graft, job)
    with closing(RunDb(directory, create=True)) as db:
        db.put_run(
            **run_directory.first_row(directory, select.job_file(file), job, resume=str(copy or ""))
        )
        if copy is not None:
            record_source(db, directory, copy)
        db.commit()
    unfinished.unmark(directory)
    if graft is not None:
        tell_source(graft, job)


def _write_job(directory: Path, file: Path, content: Json) -> None:
    paths.write(directory / "job.toml", file.read_bytes(), run_directory.JOB_MODE)
    paths.write(
        directory / "job.json", json.dumps(content, indent=1).encode(), run_directory.JOB_MODE
    )


def _remove(directory: Path, made_parent: bool) -> None:
    link = paths.index_dir() / directory.name
    if link.is_symlink():
        link.unlink()
    shutil.rmtree(directory, ignore_errors=True)
    if made_parent and not any(directory.parent.iterdir()):
        directory.parent.rmdir()


# ---------------------------------------------------------------- a checkpoint of another run
# The way on for a run whose database is lost, and for a model that is trained on elsewhere. None of
# the epochs and generations that the checkpoint knows of is given out again.


def check_source(source: Path, job: JobFile) -> Good:
    """A checkpoint that a new run of this job can begin with, every byte of which is read.

    Raises UsageError if it is none, or was made by another method or rule; DlctlError if it is
    damaged.
    """
    from dlctl.ops import decide

    if not (source / MANIFEST).is_file():
        raise UsageError(
            f'"{source}" is no checkpoint directory: it has no {MANIFEST}',
            hint="dlctl checkpoint ls -q",
        )
    if problems := checkpoints.verify(source):
        told = "".join(f"\n  {problem}" for problem in problems)
        raise DlctlError(f"this checkpoint is damaged{told}", where=str(source))
    good = source.absolute(), checkpoints.read_manifest(source)
    decide.check_fits(str(good[1]["run_id"]), good, job)
    return good


def copy_source(directory: Path, good: Good, job: JobFile) -> Path:
    """A complete copy of it in the directory of a run that is being made; as its job goes on from
    it, if that has another method or optimiser. Raises DlctlError or OSError.
    """
    from dlctl.ops import otherwise

    source, manifest = good
    made = checkpoints.create(directory, manifest["step"], manifest["number"])
    if (translation := otherwise.translated(good, job)) is not None:
        otherwise.write(translation, source, made)
        return made
    for part in filter(itemgetter("file"), parts(manifest)):
        with _opened(source / part["file"]) as old, (made / part["file"]).open("xb") as new:
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
    checkpoints.write_manifest(made, manifest)
    return made


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise DlctlError(
            f"cannot read the checkpoint: {error.strerror}",
            where=str(file),
            hint="dlctl checkpoint ls -q",
        ) from error


def record_source(db: RunDb, directory: Path, copy: Path) -> None:
    """Have a run that is being made begin with it. No commit. Raises DlctlError, sqlite3.Error."""
    db.put_terms(_terms(checkpoints.read_manifest(copy)))
    lineage.record(db, directory, copy, "")


def tell_source(good: Good, job: JobFile) -> None:
    from dlctl.ops import otherwise

    if is_doubtful(good[1]):
        told = lineage.saved_at_failure([good[1]["number"]])
        notes.warn(f"{told}: its model may be ruined")
    step, run_id = values.count(good[1]["step"]), str(good[1]["run_id"])
    notes.note(f"a new run begins with the checkpoint of {run_id} at step {step}")
    if (translation := otherwise.translated(good, job)) is not None:
        say = notes.warn if translation.afresh else notes.note
        say(otherwise.in_words(good, translation, job))


def _terms(manifest: Manifest) -> dict[str, int]:
    """The newest epochs and generations that the checkpoint knows of."""
    from dlctl.ops import verify  # only here: it takes numpy along

    terms: dict[str, int] = {}
    for shard in manifest["shards"]:
        state = shard["state"]
        generation = state.get("generation")
        terms[shard["name"]] = generation if type(generation) is int else 0
        for slot, epoch in verify.table_of(state.get("deliveries")):
            terms[f"worker-{slot}"] = max(epoch, terms.get(f"worker-{slot}", 0))
    return terms
