"""Resident memory of a server that owns ten parameters, after some seconds of a real run."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from benchmarks.figures import Figure
from benchmarks.sandbox import Dlctl, sandbox, write_job
from dlctl.runs import database, paths

MB = 1e6


def measure(*, quick: bool) -> list[Figure]:
    with sandbox() as directory:
        file = write_job(directory, servers=1, workers=1)
        sizes = [_one_run(file, 1 if quick else 5) for _ in range(1 if quick else 5)]
    resident, own = zip(*sizes, strict=True)
    return [
        Figure(
            "server_memory", "RSS of a server, 10 parameters", "MB", tuple(resident), asked=60.0
        ),
        Figure("server_memory", "unshared part of it (USS)", "MB", tuple(own)),
    ]


def _one_run(file: Path, seconds: float) -> tuple[float, float]:
    """(RSS, USS) in MB of server-0 after `seconds` of training."""
    with Dlctl().running(file):
        time.sleep(seconds)
        daemons = database.read(list(paths.all_runs())[-1])["daemons"]
        pid = next(row["pid"] for row in daemons if row["name"] == "server-0")
        memory = psutil.Process(pid).memory_full_info()
    return memory.rss / MB, memory.uss / MB
