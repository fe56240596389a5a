"""The coordinator and the agent die, and everything dies at once."""

from __future__ import annotations

import os
import signal
import time

from .job import WORKERS, Broken, Job, pause
from .on_servers import ON_DISK
from .on_workers import GAP_S_MAX, replaced
from .rows import Incident, Trial, row

BACK_S = 30.0


def judge_pause(job: Job, began: float, incident: Incident) -> None:
    incident.others_gap_s = job.watch.longest_gap_s(range(WORKERS), began, time.monotonic())
    incident.require(
        incident.others_gap_s <= GAP_S_MAX, f"a worker paused {incident.others_gap_s:.2f} s"
    )


@row("coordinator-kill", "training does not stop; lost 0, twice 0; nobody else is replaced")
def coordinator_kill(trial: Trial) -> None:
    trial.run(kill_coordinator)


def kill_coordinator(trial: Trial, job: Job) -> Incident:
    before, pid = job.incarnations(), job.pid("coordinator")
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    detected = job.until("there is a new coordinator", lambda: job.run()["pid"] not in (pid, None))
    updated = job.run()["updated_at"] or 0.0
    resumed = job.until(
        "the new coordinator has the run in hand",
        lambda: job.run()["state"] == "running" and (job.run()["updated_at"] or 0.0) > updated,
        BACK_S,
    )
    return conclude(job, before, "coordinator", began, detected, resumed)


@row("agent-kill", "training does not stop; lost 0, twice 0; the new agent adopts the daemons")
def agent_kill(trial: Trial) -> None:
    trial.run(kill_agent)


def kill_agent(trial: Trial, job: Job) -> Incident:
    before, pid = job.incarnations(), job.pid("agent-0")
    last = job.last_event()
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    detected = job.until(
        "its end is known",
        lambda: any(e["daemon"] == "agent-0" for e in job.events(last)),
    )
    resumed = job.until(
        "there is a new agent", lambda: job.daemons()["agent-0"]["pid"] not in (pid, None), BACK_S
    )
    return conclude(job, before, "agent-0", began, detected, resumed)


def conclude(
    job: Job, before: dict[str, int], name: str, began: float, detected: float, resumed: float
) -> Incident:
    """What became of the others while `name` was away."""
    incident = Incident(detect_s=detected - began, resume_s=resumed - began)
    pause(1.0)
    judge_pause(job, began, incident)
    incident.false_failovers = replaced(job, before, name)
    return incident


@row("all-kill", "kill -9 of all daemons at once, then dlctl recover: lost 0, twice 0")
def all_kill(trial: Trial) -> None:
    trial.run(kill_all)


@row("all-kill-disk", 'the same with durability = "disk"')
def all_kill_disk(trial: Trial) -> None:
    trial.run(kill_all, ON_DISK)


def kill_all(trial: Trial, job: Job) -> Incident:
    victims = job.processes()
    trial.rng.shuffle(victims)
    began = time.monotonic()
    for process in victims:
        process.kill()
    ended = job.dlctl("recover", job.directory.name)
    incident = Incident()
    if ended.code != 0:
        raise Broken(f"dlctl recover: exit {ended.code}: {ended.err[-300:]}")
    before = job.watch.now()
    resumed = job.until(
        "all workers push again",
        lambda: all(job.watch.grown(slot, before) > 0 for slot in range(WORKERS)),
        60.0,
    )
    incident.resume_s = resumed - began
    return incident
