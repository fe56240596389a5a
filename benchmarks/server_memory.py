"""Resident memory of a server that owns ten parameters, after some seconds of a real run."""

from __future__ import annotations

import time

import psutil

from benchmarks.figures import Figure
from benchmarks.sandbox import dlctl, sandbox, write_job
from dlctl import rundb, runs

MB = 1e6


def measure(*, quick: bool) -> list[Figure]:
    with sandbox() as directory:
        file = write_job(directory, servers=1, workers=1)
        sizes = [_one_run(str(file), 1 if quick else 5) for _ in range(1 if quick else 5)]
    resident, own = zip(*sizes, strict=True)
    return [
        Figure("server_memory", "RSS of a server, 10 parameters", "MB", resident, asked=60.0),
        Figure("server_memory", "of which it shares with nobody (USS)", "MB", own),
    ]


def _one_run(file: str, seconds: float) -> tuple[float, float]:
    """(RSS, USS) in MB of server-0 after `seconds` of training."""
    dlctl("start", "--fresh", file)
    time.sleep(seconds)
    newest = list(runs.all_runs())[-1]
    pid = next(row["pid"] for row in rundb.read(newest)["daemons"] if row["name"] == "server-0")
    memory = psutil.Process(pid).memory_full_info()
    dlctl("stop")
    return memory.rss / MB, memory.uss / MB
