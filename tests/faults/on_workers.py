"""Workers that die or stand still."""

from __future__ import annotations

import os
import signal
import time

import psutil

from .job import WORKERS, Job, Options, pause
from .rows import Incident, Trial, row

GAP_S_MAX = 0.9
"""A pause of somebody else. On two cores a start of torch is felt; but whoever waits for a message
that does not come waits a second at least, until it is sent again."""
PER_JOB = 6
"""Deaths on one job, so that the pauses before a replacement, which double, stay what they are for
a first or second death."""
IMPORTS_MAX = 3.0
"""Times that `import torch` may take from a death until the replacement has a push settled."""


def next_slot(trial: Trial) -> int:
    """Each in turn, so that none dies more often than PER_JOB / WORKERS on one job."""
    return len(trial.result.incidents) % WORKERS


def replaced(job: Job, before: dict[str, int], *expected: str) -> int:
    """Daemons besides the expected ones that are not the processes that they were."""
    now = job.incarnations()
    return sum(now[name] != before[name] for name in before if name not in expected)


def seen_exit(job: Job, name: str, after: int) -> bool:
    return any(e["kind"] == "exit" and e["daemon"] == name for e in job.events(after))


def await_replacement(job: Job, slot: int, incarnation: int, began: float, last: int) -> Incident:
    """Watch how a worker that is gone is noticed and replaced."""
    name = f"worker-{slot}"
    detected = job.until(f"the end of {name} is known", lambda: seen_exit(job, name, last))
    resumed = job.until(
        f"the new {name} pushes", lambda: job.watch.first_push(slot, incarnation + 1), 60.0
    )
    return Incident(detect_s=detected - began, resume_s=resumed - began)


@row(
    "worker-kill",
    "lost 0, twice 0; others do not pause; replaced within 3x import torch beside this job",
)
def worker_kill(trial: Trial) -> None:
    trial.run(kill_worker, per_job=PER_JOB)


def kill_worker(trial: Trial, job: Job) -> Incident:
    trial.import_torch_s()
    slot = next_slot(trial)
    name, before, last = f"worker-{slot}", job.incarnations(), job.last_event()
    pid = job.pid(name)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    incident = await_replacement(job, slot, before[name], began, last)
    others = [s for s in range(WORKERS) if s != slot]
    incident.others_gap_s = job.watch.longest_gap_s(others, began, time.monotonic())
    incident.false_failovers = replaced(job, before, name)
    judge_replacement(trial, incident)
    return incident


def judge_replacement(trial: Trial, incident: Incident) -> None:
    limit_s = IMPORTS_MAX * trial.import_torch_s()
    assert incident.resume_s is not None
    assert incident.others_gap_s is not None
    incident.require(
        incident.resume_s <= limit_s, f"replaced after {incident.resume_s:.1f} s, not {limit_s:.1f}"
    )
    incident.require(
        incident.others_gap_s <= GAP_S_MAX, f"another worker paused {incident.others_gap_s:.2f} s"
    )


@row("worker-stop-short", "SIGSTOP under the lease: nothing happens; others do not pause")
def worker_stop_short(trial: Trial) -> None:
    trial.run(stop_worker_shortly)


def stop_worker_shortly(trial: Trial, job: Job) -> Incident:
    slot = next_slot(trial)
    before, pid = job.incarnations(), job.pid(f"worker-{slot}")
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        pause(trial.rng.uniform(0.1, 0.6) * job.options.silent_s)
    finally:
        os.kill(pid, signal.SIGCONT)
    counts, thawed = job.watch.now(), time.monotonic()
    resumed = job.until("it goes on", lambda: job.watch.grown(slot, counts) > 0)
    others = [s for s in range(WORKERS) if s != slot]
    incident = Incident(
        resume_s=resumed - thawed,
        others_gap_s=job.watch.longest_gap_s(others, began, time.monotonic()),
        false_failovers=replaced(job, before),
    )
    assert incident.others_gap_s is not None
    incident.require(
        incident.others_gap_s <= GAP_S_MAX, f"another worker paused {incident.others_gap_s:.2f} s"
    )
    return incident


@row("worker-stop-long", "SIGSTOP past the lease: killed or fenced, replaced; twice 0")
def worker_stop_long(trial: Trial) -> None:
    trial.run(stop_worker_long, Options(silent_s=2.0), per_job=PER_JOB)


def stop_worker_long(trial: Trial, job: Job) -> Incident:
    slot = next_slot(trial)
    name, before, last = f"worker-{slot}", job.incarnations(), job.last_event()
    process = psutil.Process(job.pid(name))
    began = time.monotonic()
    process.suspend()
    try:
        incident = await_replacement(job, slot, before[name], began, last)
    finally:
        if process.is_running():
            process.resume()
    incident.require(
        not process.is_running() or process.status() == psutil.STATUS_ZOMBIE,
        "the old process still lives",
    )
    others = [s for s in range(WORKERS) if s != slot]
    incident.others_gap_s = job.watch.longest_gap_s(others, began, time.monotonic())
    incident.false_failovers = replaced(job, before, name)
    incident.require(
        incident.others_gap_s <= GAP_S_MAX, f"another worker paused {incident.others_gap_s:.2f} s"
    )
    return incident
