"""`allreduce` against DistributedDataParallel under torchrun: a step, and the death of a worker.

`examples/chargpt` with AdamW and clipping, four workers on this machine, over gloo. Both alternate,
several rounds, with batches of 16 and of 4: the cost of a group does not depend on the batch, about
2 ms of CPU time for a step of each worker, and dominates short steps. It also measures how long no
process begins a step after a kill -9; torchrun restarts all processes, and without a checkpoint
their progress is lost.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from benchmarks.figures import Figure, ratio, seconds
from benchmarks.peers.places import ROOT
from benchmarks.sandbox import Dlctl, sandbox

CHAPTER = "allreduce"
EXAMPLE = ROOT / "examples" / "chargpt"
WORKERS, ASKED_KILL_S = 4, 10.0
BATCH_SIZES, ASKED = (16, 4), 1.05
"""Samples of a worker's step, and the limit for each."""
MEASURE_S, WARM_STEPS = 20.0, 40
UNTIL_S_MAX, GAP_S_MAX = 120.0, 40.0
TASK = '''"""The example, which notes when a step begins."""

import os
import time
from pathlib import Path

from chargpt import CharGpt

times = (Path(__file__).parent / f"times-{os.getpid()}").open("a", buffering=1)


class Timed(CharGpt):
    def loss(self, model, batch):
        times.write(f"{time.monotonic()}\\n")
        return super().loss(model, batch)


task = Timed()
'''
JOB = """[job]
name = "allreduce"
task = "train.py:task"
stop = {{ seconds = 3600 }}
[algorithm]
name = "allreduce"
[inner]
name = "adamw"
lr = 2e-3
betas = [0.9, 0.95]
weight_decay = 0.1
[gradient]
clip_norm = 1.0
clip = "global"
[workers]
count = 4
batch_size = {batch_size}
threads = 1
[checkpoints]
every_s = 0
"""


def measure(*, quick: bool) -> list[Figure]:
    ours_gap_s, ddp_gap_s = list[float](), list[float]()
    found = []
    for batch_size in BATCH_SIZES:
        ours_s, ddp_s = list[float](), list[float]()
        for _ in range(1 if quick else 3):
            for running, steps_s, gaps_s in (
                (_ddp, ddp_s, ddp_gap_s), (_dlctl, ours_s, ours_gap_s),
            ):  # fmt: skip
                with sandbox() as directory, running(directory, batch_size):
                    _until(lambda d=directory: _steps(d) > WARM_STEPS, "steps")  # type: ignore[misc]
                    steps_s.append(_step_s(directory, 3.0 if quick else MEASURE_S))
                    title = f"  {running.__name__}, {batch_size}: {seconds(steps_s[-1])}"
                    print(title, file=sys.stderr, flush=True)
                    if not gaps_s:  # torchrun may take long, or not recover.
                        gaps_s.append(_gap_s(directory))
        title = f"a step, {WORKERS} workers, batches of {batch_size}, to DDP's"
        found.append(ratio(CHAPTER, title, ours_s, ddp_s, None if quick else ASKED))
    of_torchrun = median(ddp_gap_s)
    restart = f"torchrun: {seconds(of_torchrun) if of_torchrun < math.inf else 'never'}"
    what = "no step after kill -9 of a worker"
    kill = Figure(CHAPTER, what, "s", tuple(ours_gap_s), ASKED_KILL_S, detail=restart)
    return [*found, kill]


@contextmanager
def _dlctl(directory: Path, batch_size: int) -> Iterator[None]:
    shutil.copy(EXAMPLE / "task.py", directory / "chargpt.py")
    (directory / "train.py").write_text(TASK)
    file = directory / "job.toml"
    file.write_text(JOB.format(batch_size=batch_size))
    with Dlctl().running(file):
        yield


@contextmanager
def _ddp(directory: Path, batch_size: int) -> Iterator[None]:
    script = ROOT / "benchmarks" / "peers" / "chargpt_ddp.py"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "9",
        "--nproc-per-node", str(WORKERS), str(script), str(directory),
        str(batch_size),
    ]  # fmt: skip
    with (directory / "said").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


# ---------------------------------------------------------------- recorded steps


def _times(directory: Path) -> dict[int, np.ndarray]:
    """Process -> start times of its steps, monotonic seconds."""
    found = {}
    for path in directory.glob("times-*"):
        lines = path.read_text().split("\n")[:-1]
        found[int(path.name.partition("-")[2])] = np.array(lines, float)
    return found


def _steps(directory: Path) -> int:
    """Steps of the process with the fewest; 0 while some process has none."""
    counts = [times.size for times in _times(directory).values()]
    return min(counts) if len(counts) >= WORKERS else 0


def _step_s(directory: Path, measure_s: float) -> float:
    begun = time.monotonic()
    time.sleep(measure_s)
    counted = [times[times > begun] for times in _times(directory).values()]
    return median(float(times[-1] - times[0]) / (times.size - 1) for times in counted)


def _gap_s(directory: Path) -> float:
    """Seconds from a worker's death to the first step of any process after the current ones;
    infinite if none starts within `GAP_S_MAX`.
    """
    victim = max(_times(directory))
    psutil.Process(victim).kill()
    killed = time.monotonic()
    time.sleep(1.0)

    def newest() -> float:
        """The others may finish their current step and start the next one."""
        found = [times for pid, times in _times(directory).items() if pid != victim and times.size]
        late = [float(times[times > killed][1]) for times in found if (times > killed).sum() > 1]
        return min(late, default=0.0)

    try:
        _until(lambda: newest() > 0, "steps after a kill", GAP_S_MAX)
    except RuntimeError:
        return math.inf
    return newest() - killed


def _until(is_so: Callable[[], bool], what: str, limit_s: float = UNTIL_S_MAX) -> None:
    until = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > until:
            raise RuntimeError(f"no {what} in {limit_s:.0f} s")
        time.sleep(0.2)
