"""`dlctl start` until ready, against as many bare processes that only import.

Two servers and four workers are six processes beside the coordinator and the agent; the baseline is
six concurrent Python processes that import torch and the task. A second figure uses four of them.

The other figures are of examples/digits: from the command to the first step of its first worker,
against one `import torch`; and the time without a step of a worker that is killed, which is also
measured with DLCTL_SPAWN=1, when each worker imports torch itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.figures import Figure, ratio, timed
from benchmarks.sandbox import Dlctl, sandbox, write_job

SERVERS, WORKERS = 2, 4
IMPORTS = "import torch, train; print(flush=True)"
EXAMPLE = Path(__file__).parents[1] / "examples" / "digits"
MARKING = """
import os, time
from pathlib import Path

of_digits = Digits.loss
began = []


def loss(self, model, batch):
    if not began:
        began.append(time.time())
        with Path(__file__).with_name("first").open("a") as file:
            file.write(f"{os.environ['DLCTL_NAME']} {os.getpid()} {began[0]}\\n")
    return of_digits(self, model, batch)


Digits.loss = loss
"""
"""Behind the example's task: writes when each worker begins its first step."""
T = TypeVar("T")
VICTIM = "worker-1"
AGAIN_S = 60.0
SERIAL_S = 1.0
"""For all that a start does beside importing torch."""


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
    rounds = 1 if quick else 7
    first_s, torch_s, again_s, alone_s = _of_digits(rounds)
    what = "digits: start until the first step"
    rest_s = [took_s - SERIAL_S for took_s in first_s]
    steps = [ratio("start", f"{what}, less 1 s / one `import torch`", rest_s, torch_s, asked=1.2)]
    what = "digits: a killed worker steps again"
    steps.append(Figure("start", what, "s", tuple(again_s), asked=0.7))
    steps.append(ratio("start", f"{what} / with its own imports", again_s, alone_s))
    what = f"start, {SERVERS} servers + {WORKERS} workers"
    return [
        ratio("start", f"{what} / {SERVERS + WORKERS} bare imports", ours, bare, asked=1.5),
        ratio("start", f"{what} / {WORKERS} bare imports", ours, fewer),
        *steps,
    ]


def _of_digits(rounds: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds, round by round: until the first step, of `import torch`, until a killed worker steps
    again, and the same without a template.
    """
    first_s, torch_s, again_s, alone_s = ([] for _ in range(4))
    for _ in range(rounds):
        torch_s.append(timed(_import_torch))
        until_first, until_again = _life()
        first_s.append(until_first)
        again_s.append(until_again)
        os.environ["DLCTL_SPAWN"] = "1"
        try:
            alone_s.append(_life()[1])
        finally:
            del os.environ["DLCTL_SPAWN"]
    return first_s, torch_s, again_s, alone_s


def _import_torch() -> None:
    subprocess.run([sys.executable, "-c", "import torch"], check=True)


def _life() -> tuple[float, float]:
    """Seconds from the command until the first step, and from the kill of a worker until its
    successor's.
    """
    with sandbox() as directory:
        for name in ("digits.npz", "job.toml"):
            shutil.copy(EXAMPLE / name, directory)
        job = directory / "job.toml"
        job.write_text(job.read_text().replace("epochs = 20", "seconds = 3600"))
        (directory / "train.py").write_text((EXAMPLE / "train.py").read_text() + MARKING)
        began = time.time()
        with Dlctl().running(job):
            times = _until(lambda: _firsts(directory), "the first step")
            until_first = min(at for _, at in times.values()) - began
            pid, _ = _until(lambda: _firsts(directory).get(VICTIM), f"a step of {VICTIM}")
            os.kill(pid, signal.SIGKILL)
            killed = time.time()

            def again() -> float | None:
                now, at = _firsts(directory)[VICTIM]
                return at if now != pid else None

            return until_first, _until(again, f"a step of the next {VICTIM}") - killed


def _firsts(directory: Path) -> dict[str, tuple[int, float]]:
    """Worker -> its pid and when it began its first step; of the newest process."""
    file = directory / "first"
    lines = file.read_text().splitlines() if file.exists() else []
    return {name: (int(pid), float(at)) for name, pid, at in map(str.split, lines)}


def _until(found: Callable[[], T | None], what: str) -> T:
    deadline = time.monotonic() + AGAIN_S
    while not (value := found()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no sign of {what} for {AGAIN_S} s")
        time.sleep(0.005)
    return value


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
