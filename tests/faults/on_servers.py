"""Servers that die, also in the middle of applying a push, or stand still."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import psutil

from .job import SERVERS, Job, Options, pause
from .on_workers import replaced, seen_exit
from .rows import Incident, Trial, row

UNAVAILABLE_S_MAX = 2.0
POINTS = ("block updated", "commit begun", "commit half written", "commit written")
SPARSE_POINTS = (
    "undo begun", "undo block written", "block scattered", "commit begun", "commit half written",
    "commit written",
)  # fmt: skip
DISK_POINTS = ("commit begun", "journal written", "record written", "commit written")
PASSES = (1000, 2000)
"""Some seconds of pushes."""
BIG = Options(cells=1 << 21, work=0, push="off")
"""Shards of 8 MiB and workers that do nothing but push: a server applies most of the time."""
COMING = replace(BIG, transport="tcp", cells=1 << 23)
"""Shards of 32 MiB: a server works on a push before all segments of it have come."""
ON_DISK = Options(durability="disk", cells=1 << 14, push="10MB/s")
"""Small shards: every push is on the disk before it is acknowledged."""
SPARSE = Options(compression='name = "topk"\ndensity = 0.001', push="0.15MB/s")
"""A gradient has one element that is not zero on each shard; that alone travels."""


def await_server(job: Job, shard: int, incarnation: int, began: float, last: int) -> Incident:
    """Watch how a server that is gone is noticed, replaced, and takes pushes again."""
    name = f"server-{shard}"
    detected = job.until(f"the end of {name} is known", lambda: seen_exit(job, name, last))
    job.until(f"{name} is back", lambda: job.incarnations()[name] > incarnation)
    job.until(
        f"{name} serves again", lambda: job.daemons()[name]["phase"] == "serving", timeout_s=30.0
    )
    counts = job.watch.now()
    resumed = job.until("pushes are settled again", lambda: job.watch.shard_grown(shard, counts))
    return Incident(detect_s=detected - began, resume_s=resumed - began)


def judge_outage(job: Job, shard: int, began: float, incident: Incident, limit_s: float) -> None:
    """How long the shard settled nothing at all. `others_gap_s` is that."""
    incident.others_gap_s = job.watch.longest_shard_gap_s(shard, began, time.monotonic())
    incident.require(
        incident.others_gap_s <= limit_s,
        f"shard {shard} settled nothing for {incident.others_gap_s:.1f} s",
    )


@row("server-kill", "lost 0, twice 0; the shard is unavailable for 2 s at most")
def server_kill(trial: Trial) -> None:
    trial.run(kill_server)


def kill_server(trial: Trial, job: Job) -> Incident:
    shard = trial.rng.randrange(SERVERS)
    name, before, last = f"server-{shard}", job.incarnations(), job.last_event()
    pid = job.pid(name)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    incident = await_server(job, shard, before[name], began, last)
    judge_outage(job, shard, began, incident, UNAVAILABLE_S_MAX)
    incident.false_failovers = replaced(job, before, name)
    return incident


@row("server-kill-in-apply", "the same with large shards, so that most kills hit an apply")
def server_kill_in_apply(trial: Trial) -> None:
    trial.run(kill_server, BIG)


@row("server-kill-coming", "the same over TCP, so that most kills hit a push that is coming")
def server_kill_coming(trial: Trial) -> None:
    trial.run(kill_server, COMING)


@row("server-kill-disk", 'the same with durability = "disk"')
def server_kill_disk(trial: Trial) -> None:
    trial.run(kill_server, ON_DISK)


@row("server-failpoint", "a server kills itself at a named step of an update: the same")
def server_failpoint(trial: Trial) -> None:
    at_points(trial, POINTS, Options())


@row("server-failpoint-sparse", "the same in sparse updates, which take another way")
def server_failpoint_sparse(trial: Trial) -> None:
    at_points(trial, SPARSE_POINTS, SPARSE)


@row("server-failpoint-disk", "the same at the steps of a commit on a disk")
def server_failpoint_disk(trial: Trial) -> None:
    at_points(trial, DISK_POINTS, ON_DISK)


def at_points(trial: Trial, points: tuple[str, ...], options: Options) -> None:
    """Every incarnation of every server dies at the n-th pass of this point: again and again."""
    while len(trial.result.incidents) < trial.times and not trial.result.problems:
        point = f"{trial.rng.choice(points)}:{trial.rng.randrange(*PASSES)}"
        trial.result.notes.append(f"    {point}")
        with_point = replace(options, daemon_env={"DLCTL_FAILPOINT": point})
        trial.run(await_death, with_point, per_job=4, jobs=1)


def await_death(trial: Trial, job: Job) -> Incident:
    """Whichever server is next."""
    before, last = job.incarnations(), job.last_event()
    dead: list[str] = []

    def somebody_died() -> bool:
        events = [e for e in job.events(last) if e["kind"] == "exit"]
        dead[:] = [e["daemon"] for e in events if e["daemon"].startswith("server")]
        return bool(dead)

    began = job.until("a server has killed itself", somebody_died, 60.0)
    shard = int(dead[0].rpartition("-")[2])
    incident = await_server(job, shard, before[dead[0]], began, last)
    incident.detect_s = None
    judge_outage(job, shard, began, incident, UNAVAILABLE_S_MAX)
    servers = [f"server-{index}" for index in range(SERVERS)]
    incident.false_failovers = replaced(job, before, *servers)
    return incident


@row("server-stop-long", "SIGSTOP past the lease: replaced; the old generation acks nothing")
def server_stop_long(trial: Trial) -> None:
    trial.run(stop_server_long, Options(silent_s=2.0))


def stop_server_long(trial: Trial, job: Job) -> Incident:
    shard = trial.rng.randrange(SERVERS)
    name, before, last = f"server-{shard}", job.incarnations(), job.last_event()
    process = psutil.Process(job.pid(name))
    began = time.monotonic()
    process.suspend()
    try:
        incident = await_server(job, shard, before[name], began, last)
    finally:
        if process.is_running():
            process.resume()
    # Whatever it may still say is said now; the ledger shows whether anybody believed it.
    pause(0.5)
    incident.require(
        not process.is_running() or process.status() == psutil.STATUS_ZOMBIE,
        "the old process still lives",
    )
    judge_outage(job, shard, began, incident, job.options.silent_s + UNAVAILABLE_S_MAX + 1.0)
    incident.false_failovers = replaced(job, before, name)
    return incident
