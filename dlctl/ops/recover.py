"""Starting the coordinator of a run directory: of a new run, of one that resumes with all of its
coordinator's state, or from a checkpoint.
"""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.errors import DlctlError
from dlctl.launch import local
from dlctl.ops import control, other_hosts, remains, stop
from dlctl.ops.cases import Case, Start
from dlctl.ops.decide import Action
from dlctl.records.memory import End, Memory, RunMemory
from dlctl.runs import database, facts, lineage, lock, paths, reach, task_code, terms
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import ENDED, Snapshot, read_job
from dlctl.util import notes, regular, values

if TYPE_CHECKING:
    import subprocess

    from dlctl.job.config import JobFile

LED_S = 5.0
"""Time for an agent to restart its coordinator, and for that to put itself on record."""
OVER_S = 60.0
"""Time for a coordinator to terminate the daemons of its run, including those on unreachable hosts.
"""
JOB_MODE = 0o644
Json = dict[str, Any]


class Launched(NamedTuple):
    directory: Path
    process: subprocess.Popen[bytes] | None
    """The coordinator; None if nothing had to be started."""
    resumes: bool = False
    """The run resumes where it stopped; otherwise it is new, or resumes from a checkpoint."""


def job_files(new: Start) -> dict[str, bytes]:
    """The files in a run directory that describe its job."""
    content = json.dumps(new.content, indent=1).encode()
    return {"job.toml": regular.read_bytes(new.file), "job.json": content}


def write(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        paths.write(directory / name, data, JOB_MODE)


def first_row(directory: Path, job_file: str, job: JobFile, resume: Path | None) -> Json:
    """The database's content before the coordinator writes anything."""
    return {
        "run_id": directory.name,
        "name": job.job.name,
        "job_file": job_file,
        "place": lock.place(directory),
        "algorithm": job.algorithm.name,
        "state": "pending",
        "reason": "",
        "waiting": "",
        "resume": "" if resume is None else str(resume),
        **dict.fromkeys(("pid", "pid_start", "control", "control_key")),
        **dict.fromkeys(("started_at", "ready_at", "ended_at", "updated_at")),
        **dict.fromkeys(("dead_s", "ran_s"), 0.0),
    }


def perform(case: Case) -> Launched | None:
    """Perform the action of `dlctl recover`; None if there is nothing to do. Raises DlctlError if
    the directory cannot be written or the process cannot be started.
    """
    if case.action is Action.CONTINUE:
        return continue_run(case)
    # Without live settings: one of them may be the reason for the rollback.
    return resume(case, settings={}) if case.action is Action.RESUME else None


def _dead_s(snapshot: Snapshot, *, is_dead: bool) -> float:
    """How long nothing of the run was alive, since its start. is_dead: up to now."""
    run, before_s = snapshot.run, values.number(snapshot.run.get("dead_s")) or 0.0
    last = values.number(run.get("ended_at") or run.get("updated_at"))
    return before_s + (max(0.0, snapshot.now - last) if is_dead and last is not None else 0.0)


def continue_run(case: Case) -> Launched:
    """Start the next coordinator of a resumable run; it finds everything else on its own. On
    failure the run is unchanged.
    """
    snapshot, findings = case.run, case.findings
    assert snapshot is not None
    assert findings is not None
    directory, hosts = snapshot.directory, other_hosts.of(snapshot)
    lock.refuse_unknown_coordinator(snapshot)
    if snapshot.coordinator_pid is not None:  # Its agent has started one, not on record yet.
        return Launched(directory, None, resumes=True)
    memory = Memory(remains.read_memory(directory))
    was = memory.piece(RunMemory) or RunMemory()
    gone = [name for name in hosts if name not in (*findings.alive, *findings.away)]
    if other_hosts.moves(snapshot) and not findings.alive:
        # No daemon there finds the address of a coordinator on another machine.
        gone = other_hosts.agents(snapshot)
    is_ending = was.state == "stopping" and memory.piece(End) is not None
    row: Json = {
        "state": "stopping" if is_ending else "running" if memory.has_released else "starting",
        # For the next coordinator: see `persistence.corrected`.
        "recovery": {
            "served": [shard.name for shard in findings.shards if shard.path and shard.version],
            "gone": gone,
        },
        "reason": "",
        "waiting": "",
        "ended_at": None,
        "ready_at": None,
        "dead_s": _dead_s(snapshot, is_dead=not findings.alive),
    }
    if not findings.alive:
        row["control"] = None  # No daemon uses the old address; another process may have it by now.
    with explained(directory):
        _put(directory, row)
        try:
            return start_coordinator(directory, resumes=True)
        except BaseException:
            _put(directory, {key: snapshot.run.get(key) for key in row})
            raise


def resume(case: Case, settings: Json) -> Launched:
    """Resume from the case's checkpoint; terminates live daemons, and removes everything later, on
    other hosts too. `settings` are the live ones that stay. On failure its files are unchanged; if
    not even its database could be written, its shards still exist.
    """
    previous, new = case.run, case.new
    assert previous is not None
    assert case.checkpoint is not None
    directory, checkpoint = previous.directory, case.checkpoint[0]
    files = {} if new is None else job_files(new)
    job = remains.read_jobfile(directory) if new is None else new.job
    job_file = str(previous.run.get("job_file") or "")
    lock.refuse_unknown_coordinator(previous)
    if previous.coordinator_pid is not None:
        raise DlctlError(
            f"a coordinator of {previous.run_id} is running (pid {previous.coordinator_pid})",
            where=str(directory),
            hint=f"dlctl status -j {previous.run_id}",
        )
    changes = [f"changed: {change.text()}" for change in case.changes]
    cost = "; ".join(filter(None, (case.cost, *changes)))
    stop.clean_up(previous, 0.0)
    row = {**first_row(directory, job_file, job, checkpoint), "settings": settings}
    row["ran_s"] = facts.ran_s(previous) or 0.0
    with explained(directory):
        before = {name: regular.read_bytes(directory / name) for name in files}
        with closing(RunDb(directory)) as db:
            db.put_run(**row)
            lineage.record(db, directory, checkpoint, cost)
            terms.carry_over(directory, db)
            db.clear_memory()
            db.commit()
        try:
            # The old job gives the location. No coordinator may be alive: its agents are ended.
            stop.remove_kept(previous)
            other_hosts.end(previous, 0.0, purge=True)
            write(directory, files)
            return start_coordinator(directory)
        except BaseException:
            write(directory, before)
            _put(directory, {key: previous.run.get(key) for key in row})
            raise


def _put(directory: Path, row: Json) -> None:
    with closing(RunDb(directory)) as db:
        db.put_run(**row)
        db.commit()


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turns errors of the operating system or the database into a DlctlError with a location."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        text, where = f"cannot write the run's database: {error}", str(directory)
        if isinstance(error, OSError):
            text = f"cannot read or write a file: {error.strerror or error}"
            where = str(error.filename or directory)
        raise DlctlError(text, where=where, hint=f"df -h {directory.parent}") from error


def start_coordinator(directory: Path, *, resumes: bool = False) -> Launched:
    """Start the coordinator of a prepared run directory. Unless daemons of the run are alive, it
    uses the current files of the task. Raises DlctlError or OSError.
    """
    paths.socket_address(directory.name, "coordinator")
    paths.register(directory)
    if mode := paths.open_to_all(directory):
        notes.note(f"other users can read the files of {directory.name} (mode {mode})")
        notes.note(f"to close it: chmod 700 {shlex.quote(str(directory))}")
    _note_reach(directory)
    os.utime(directory / "job.json")  # The last started run is the newest: `snapshot.started`.
    if (directory / task_code.CODE).exists() and not any(local.living(directory)):
        task_code.forget(directory)
    return Launched(directory, local.start_coordinator(directory), resumes)


def _note_reach(directory: Path) -> None:
    """Write down how commands reach this machine from others."""
    launcher = other_hosts.launcher_of(read_job(directory))
    place = None if launcher is None else launcher.reach()
    if place is not None:
        place.write(directory)
    elif launcher is not None and launcher.moves:
        file = database.read(directory).get("job_file") or "JOBFILE"
        raise DlctlError(
            "the coordinator of this run does not run on this machine, but in a job of its own",
            where=str(directory),
            hint=f"dlctl start {shlex.quote(str(file))}",
        )
    else:
        (directory / reach.FILE).unlink(missing_ok=True)


# ---------------------------------------------------------------- an earlier coordinator


def settled(snapshot: Snapshot) -> Snapshot:
    """Wait for the coordinator of an ended run to exit, which until then owns the run and would
    overwrite later records; and for one that an agent starts, or that was started at the moment
    both were killed, to put itself on record. Returns the run's state then.

    Raises DlctlError if it does not exit.
    """

    def is_exiting(now: Snapshot) -> bool:
        return now.state in ENDED and now.coordinator_pid is not None

    def is_led_soon(now: Snapshot) -> bool:
        return (now.is_live and not remains.is_led(now)) or lock.has_unknown_coordinator(now)

    if is_exiting(snapshot):
        of_run = f"the coordinator of {snapshot.run_id} to exit (pid {snapshot.coordinator_pid})"
        notes.note(f"waiting for {of_run}")
        snapshot = control.awaited(snapshot, is_exiting, OVER_S)
        if is_exiting(snapshot):
            hint = f"dlctl stop --kill -j {snapshot.run_id}"
            raise DlctlError(f"waited in vain for {of_run}", hint=hint)
    return control.awaited(snapshot, is_led_soon, LED_S)
