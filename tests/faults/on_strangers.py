"""Who does not belong to a run comes to its ports: the job trains on as if nobody was there."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from .job import WORKERS, Job, Options, pause
from .on_network import PORTS, networked
from .on_workers import replaced
from .rows import Incident, Trial, root, row, tool
from .strangers import SLOT

LOOK_S = 3.0
RATE_MIN = 0.9
GROWTH_BYTES_MAX = 64 << 20
NEEDS = (root, tool("nft"), tool("ip"), tool("unshare"), tool("nsenter"))


def rate(job: Job, slots: range) -> float:
    """Pushes per second of these workers that all shards have settled."""
    before, began = job.watch.now(), time.monotonic()
    pause(LOOK_S)
    grown = sum(job.watch.grown(slot, before) for slot in slots)
    return grown / (time.monotonic() - began)


def memory(job: Job) -> dict[str, int]:
    names = ("coordinator", "server-0", "server-1")
    return {name: psutil.Process(job.pid(name)).memory_info().rss for name in names}


def strangers(trial: Trial, way: str, slots: range = range(WORKERS)) -> None:
    """`slots`: the workers that have nothing to do with it."""
    ratios: list[float] = []

    def come(trial: Trial, job: Job, options: Options) -> Incident:
        before, last, held = job.incarnations(), job.last_event(), memory(job)
        alone = rate(job, slots)
        words = [sys.executable, "-m", "tests.faults.strangers", way, str(LOOK_S + 1.0)]
        stranger = subprocess.Popen(
            [*options.enter, *words, str(job.directory), *map(str, PORTS)],
            cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            pause(1.0)  # It has to import what it needs.
            ratios.append(rate(job, slots) / alone)
        finally:
            stranger.kill()
            stranger.wait()
        incident = Incident(false_failovers=replaced(job, before))
        grown = {name: rss - held[name] for name, rss in memory(job).items()}
        most = max(grown, key=lambda name: grown[name])
        incident.require(
            grown[most] <= GROWTH_BYTES_MAX, f"{most} has grown by {grown[most] >> 20} MiB"
        )
        deaths = [e["text"] for e in job.events(last) if e["kind"] in ("exit", "silent", "lost")]
        incident.require(not deaths, f"somebody was taken for dead: {deaths[:2]}")
        return incident

    with networked() as (_, options):
        trial.run(lambda trial, job: come(trial, job, options), options)
    if ratios:
        median = statistics.median(ratios)
        trial.result.notes.append(f"    pushes per second, with strangers / alone: {median:.2f}")
        if median < RATE_MIN:
            trial.result.problems.append(f"with strangers the job is {median:.2f} as fast as alone")


@row("strangers-noise", "HTTP, TLS, half handshakes: rate 0.9, memory bounded", 10, NEEDS)
def noise(trial: Trial) -> None:
    strangers(trial, "noise")


@row("strangers-idle", "a thousand idle connections: the same", 10, NEEDS)
def idle(trial: Trial) -> None:
    strangers(trial, "idle")


@row("strangers-knocking", "unknown keys, no keys: the same", 10, NEEDS)
def knocking(trial: Trial) -> None:
    strangers(trial, "knocking")


@row("strangers-guest", "a known key that sends rubbish: the same", 10, NEEDS)
def guest(trial: Trial) -> None:
    strangers(trial, "guest")


@row("strangers-repeating", "a worker's key, the same push for ever: the others' rate", 10, NEEDS)
def repeating(trial: Trial) -> None:
    strangers(trial, "repeating", range(SLOT))


@row("strangers-deaf", "a worker's key that fetches and never reads: the same", 10, NEEDS)
def deaf(trial: Trial) -> None:
    strangers(trial, "deaf", range(SLOT))
