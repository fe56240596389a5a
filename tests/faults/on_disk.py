"""A disk that is full or fails, while a checkpoint is written or a server keeps its shard."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from dlctl.roles.coordinator.problems import STALLED_S
from dlctl.runs import lineage
from dlctl.util.names import WAITS_FOR_DISK

from .job import SERVERS, WORKERS, Broken, Job, Options, pause
from .on_servers import ON_DISK, await_server
from .on_workers import GAP_S_MAX, replaced
from .rows import Incident, Trial, root, row, tool

DISK_BYTES = 24 << 20
SHARD_BYTES = (1 << 14) * 4
"""The parameters of one of `ON_DISK`; a base is larger."""
CHECKPOINT_BYTES = 2 * (1 << 16) * 4
"""Of the shards; the workers' residuals come on top."""
ATTACHED_S = 5.0
ATTEMPTS = 20
NOTE_AFTER_S = 10.0
SLOW_S = 2.0
"""For each fsync of whoever has the slow disk."""


def small_disk(path: Path) -> None:
    size = f"size={DISK_BYTES},mode=0755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "dlctl-faults", str(path)], check=True)


def save(job: Job) -> None:
    """A checkpoint that must succeed. Raises Broken."""
    ended = job.dlctl("checkpoint")
    if ended.code != 0:
        raise Broken(f"dlctl checkpoint: exit {ended.code}: {ended.err[-300:]}")


def good(job: Job) -> Path | None:
    found = lineage.newest_good(job.directory)
    return found[0] if found else None


def judge_failed_checkpoint(
    job: Job, before: Path | None, words: tuple[str, ...], incident: Incident
) -> None:
    """What must hold while a checkpoint cannot be written; `words`: status must say one of them."""
    counts = job.watch.now()
    job.until(
        "training goes on", lambda: all(job.watch.grown(s, counts) >= 5 for s in range(WORKERS))
    )
    incident.require(good(job) == before, "the last good checkpoint is not what it was")
    deadline = time.monotonic() + NOTE_AFTER_S
    while not any(word in (status := job.dlctl("status").out) for word in words):
        if time.monotonic() > deadline:
            incident.require(False, f"status does not say {' or '.join(words)}: {status}")
            return


@row(
    "disk-full",
    "training goes on, the last good checkpoint is intact, status says so; then all is well",
    needs=(root, tool("mount")),
)
def disk_full(trial: Trial) -> None:
    trial.run(fill_disk, Options(disk=small_disk))


def fill_disk(trial: Trial, job: Job) -> Incident:
    save(job)
    before, incarnations = good(job), job.incarnations()
    began = time.monotonic()
    filler = job.path / "runs" / "filler"
    incident = Incident()
    try:
        fill(filler, left_bytes=trial.rng.randrange(CHECKPOINT_BYTES * 3 // 4))
        ended = job.dlctl("checkpoint")
        incident.detect_s = time.monotonic() - began
        incident.require(ended.code != 0, "dlctl checkpoint says that all is well")
        incident.require("No space left" in ended.err, f"dlctl checkpoint says {ended.err[:200]}")
        if ended.code != 0:
            judge_failed_checkpoint(
                job, before, ("No space left", "[disk-full]", "[coordinator-unwritable]"), incident
            )
    finally:
        filler.unlink(missing_ok=True)
    healed = time.monotonic()
    save(job)
    incident.resume_s = time.monotonic() - healed
    incident.require(good(job) != before, "there is no new checkpoint after the disk has room")
    incident.others_gap_s = job.watch.longest_gap_s(range(WORKERS), began, time.monotonic())
    incident.require(
        incident.others_gap_s <= GAP_S_MAX, f"a worker paused {incident.others_gap_s:.2f} s"
    )
    incident.false_failovers = replaced(job, incarnations)
    return incident


def fill(path: Path, left_bytes: int) -> None:
    """Leave so much room on the disk of `path`, where others write meanwhile."""
    with path.open("wb") as file:
        for _ in range(ATTEMPTS):
            room = shutil.disk_usage(path.parent).free
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(1, room - left_bytes))
                return
    raise Broken(f"{path.parent} cannot be filled")


@row(
    "disk-full-journal",
    'durability = "disk": who dies on a full disk is replaced when there is room; lost 0, twice 0',
    needs=(root, tool("mount")),
)
def disk_full_journal(trial: Trial) -> None:
    trial.run(die_on_full_disk, replace(ON_DISK, disk=small_disk))


def die_on_full_disk(trial: Trial, job: Job) -> Incident:
    """With no room at all both servers end, because their journals are full; with a little, the
    next server can be put on record, and has no room for its shard.
    """
    shard = trial.rng.randrange(SERVERS)
    name, before, last = f"server-{shard}", job.incarnations(), job.last_event()
    filler = job.path / "runs" / "filler"
    server = psutil.Process(job.pid(name))
    try:
        fill(filler, left_bytes=trial.rng.choice([0, trial.rng.randrange(SHARD_BYTES)]))
        with suppress(psutil.NoSuchProcess):  # Its journal is full: it may have ended by itself.
            server.kill()
        pause(trial.rng.uniform(1.0, 4.0))
        status = job.dlctl("status")
    finally:
        filler.unlink(missing_ok=True)
    healed = time.monotonic()
    incident = await_server(job, shard, before[name], healed, last)
    incident.detect_s = None
    incident.require("[disk-full]" in status.out, f"no full disk in status: {status.out}")
    incident.false_failovers = replaced(job, before, *(f"server-{k}" for k in range(SERVERS)))
    return incident


@row(
    "disk-error",
    "fsync fails with EIO: training goes on, the last good checkpoint is intact, status says so",
    needs=(root, tool("strace")),
)
def disk_error(trial: Trial) -> None:
    trial.run(fail_fsync)


def fail_fsync(trial: Trial, job: Job) -> Incident:
    save(job)
    before, incarnations = good(job), job.incarnations()
    name = trial.rng.choice(["server-0", "server-1", "worker-0", "coordinator"])
    nth = trial.rng.randrange(1, 3)
    began = time.monotonic()
    incident = Incident()
    with failing(job, name, f"fsync:error=EIO:when={nth}"):
        ended = job.dlctl("checkpoint")
        incident.detect_s = time.monotonic() - began
        incident.require(
            ended.code != 0, f"dlctl checkpoint says that all is well; fsync {nth} of {name} failed"
        )
    if ended.code != 0:
        judge_failed_checkpoint(job, before, ("Input/output error",), incident)
    healed = time.monotonic()
    save(job)
    incident.resume_s = time.monotonic() - healed
    incident.require(good(job) != before, "there is no new checkpoint after the disk is well")
    incident.false_failovers = replaced(job, incarnations)
    return incident


@row(
    "disk-slow",
    f"each fsync takes {SLOW_S:g} s longer: nobody pauses, and the checkpoint is good",
    needs=(root, tool("strace")),
)
def disk_slow(trial: Trial) -> None:
    trial.run(delay_fsync)


def delay_fsync(trial: Trial, job: Job) -> Incident:
    before, incarnations = good(job), job.incarnations()
    name = trial.rng.choice(["server-0", "server-1", "worker-0", "coordinator"])
    began = time.monotonic()
    with failing(job, name, f"fsync:delay_enter={SLOW_S * 1e6:.0f}"):
        save(job)
        saved = time.monotonic()
    incident = Incident(detect_s=None, resume_s=saved - began)
    incident.require(saved - began >= SLOW_S, f"no fsync of {name} was slow")
    incident.require(good(job) not in (None, before), "there is no new checkpoint")
    incident.others_gap_s = job.watch.longest_gap_s(range(WORKERS), began, saved)
    incident.require(
        incident.others_gap_s <= GAP_S_MAX,
        f"a worker paused {incident.others_gap_s:.2f} s for {name}",
    )
    incident.false_failovers = replaced(job, incarnations)
    return incident


@row(
    "disk-error-journal",
    'durability = "disk": fdatasync fails with EIO: the server ends, lost 0, twice 0',
    needs=(root, tool("strace")),
)
def disk_error_journal(trial: Trial) -> None:
    trial.run(fail_fdatasync, ON_DISK)


def fail_fdatasync(trial: Trial, job: Job) -> Incident:
    """The push is on the disk or not, and nobody was told of it; the next server sees to that."""
    shard = trial.rng.randrange(SERVERS)
    name, before, last = f"server-{shard}", job.incarnations(), job.last_event()
    nth = trial.rng.randrange(1, 20)
    with failing(job, name, f"fdatasync:error=EIO:when={nth}"):
        began = time.monotonic()
        incident = await_server(job, shard, before[name], began, last)
    incident.detect_s = None
    said = [e["text"] for e in job.events(last) if e["kind"] == "exit" and e["daemon"] == name]
    incident.require("exit 1" in said[0], f"the server ended otherwise: {said}")
    incident.false_failovers = replaced(job, before, name)
    return incident


@row(
    "disk-slow-journal",
    f'durability = "disk": each fdatasync takes {SLOW_S:g} s longer: status says so, pushes are '
    "settled, nobody is replaced",
    needs=(root, tool("strace")),
)
def disk_slow_journal(trial: Trial) -> None:
    trial.run(delay_fdatasync, ON_DISK)


def delay_fdatasync(trial: Trial, job: Job) -> Incident:
    shard = trial.rng.randrange(SERVERS)
    name, before = f"server-{shard}", job.incarnations()
    with failing(job, name, f"fdatasync:delay_enter={SLOW_S * 1e6:.0f}"):
        began = time.monotonic()
        detected = job.until(
            "status says so", lambda: job.daemons()[name]["phase"] == WAITS_FOR_DISK, 20.0
        )
        counts = job.watch.now()
        job.until("pushes are settled", lambda: job.watch.shard_grown(shard, counts))
    healed = time.monotonic()
    resumed = job.until("all is well", lambda: job.daemons()[name]["phase"] == "serving", 20.0)
    incident = Incident(detect_s=detected - began, resume_s=resumed - healed)
    incident.false_failovers = replaced(job, before)
    return incident


@row(
    "disk-stalled-journal",
    f'durability = "disk": fdatasync hangs for more than {STALLED_S:g} s: `status` says so, '
    "nobody is replaced",
    needs=(root, tool("strace")),
)
def disk_stalled_journal(trial: Trial) -> None:
    trial.run(stall_fdatasync, ON_DISK)


def stall_fdatasync(trial: Trial, job: Job) -> Incident:
    shard = trial.rng.randrange(SERVERS)
    name, before = f"server-{shard}", job.incarnations()
    with failing(job, name, f"fdatasync:delay_enter={(STALLED_S + 5.0) * 1e6:.0f}"):
        began = time.monotonic()
        detected = job.until(
            "status says so", lambda: stalled(job) == [name], STALLED_S + 2 * ATTACHED_S
        )
    counts = job.watch.now()
    healed = time.monotonic()
    resumed = job.until("pushes are settled", lambda: job.watch.shard_grown(shard, counts))
    job.until("all is well", lambda: not stalled(job), 20.0)
    incident = Incident(detect_s=detected - began, resume_s=resumed - healed)
    incident.false_failovers = replaced(job, before)
    return incident


def stalled(job: Job) -> list[str]:
    """The servers whose disk hangs, as `dlctl status` says."""
    problems = job.run()["problems"] or []
    return [problem["daemon"] for problem in problems if problem["code"] == "disk-stalled"]


@contextmanager
def failing(job: Job, name: str, injection: str) -> Iterator[None]:
    """Have system calls of a daemon fail while this lasts."""
    trace = injection.partition(":")[0]
    log = job.path / "strace.log"
    log.unlink(missing_ok=True)
    arguments = ["-f", "-q", "-o", str(log), "-e", f"trace={trace}", "-e", f"inject={injection}"]
    with subprocess.Popen(
        ["strace", *arguments, "-p", str(job.pid(name))], stderr=subprocess.DEVNULL
    ) as strace:
        try:
            status = Path(f"/proc/{job.pid(name)}/status")
            job.until("strace has it", lambda: "TracerPid:\t0\n" not in status.read_text(), 5.0)
            pause(0.1)  # all of its threads
            yield
        finally:
            strace.terminate()
            strace.wait(ATTACHED_S)
