"""`dlctl start` until ready, against as many bare processes that only import.

Two servers and four workers are six processes beside the coordinator and the agent; the baseline is
six concurrent Python processes that import torch and the task. A second figure uses four of them:
as many as import torch in a run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figures import Figure, ratio
from benchmarks.sandbox import Dlctl, sandbox, write_job

SERVERS, WORKERS = 2, 4
IMPORTS = "import torch, train; print(flush=True)"


def measure(*, quick: bool) -> list[Figure]:
    times: list[tuple[float, float, float]] = []
    with sandbox() as directory:
        file = write_job(directory, servers=SERVERS, workers=WORKERS)
        _import_side_by_side(1, directory)  # the files are read from the disk once, uncounted
        for _ in range(1 if quick else 7):
            bare_s = _import_side_by_side(SERVERS + WORKERS, directory)
            with Dlctl().running(file) as ours_s:
                pass  # only the time until ready is measured
            fewer_s = _import_side_by_side(WORKERS, directory)
            times.append((ours_s, bare_s, fewer_s))
    ours, bare, fewer = zip(*times, strict=True)
    what = f"start, {SERVERS} servers + {WORKERS} workers"
    return [
        ratio("start", f"{what} / {SERVERS + WORKERS} bare imports", ours, bare, asked=1.5),
        ratio("start", f"{what} / {WORKERS} bare imports", ours, fewer),
    ]


def _import_side_by_side(count: int, directory: Path) -> float:
    """Seconds until the last of `count` processes has imported torch and the task."""
    began = time.perf_counter()
    processes = [
        subprocess.Popen([sys.executable, "-c", IMPORTS], cwd=directory, stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    said = [process.stdout.readline() for process in processes if process.stdout]
    took_s = time.perf_counter() - began
    if said != [b"\n"] * count:
        raise RuntimeError("a bare process could not import torch and the task")
    for process in processes:
        process.communicate()  # waits for its exit
    return took_s
