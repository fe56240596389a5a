"""`sandblaster` with one of eight workers ten times slower, against the ideal time.

The task sleeps for the duration of a batch, so that eight workers fit on any machine. In the ideal
case no worker waits: the time without a slow worker, times 8 workers, divided by the speed of all,
which is 7.1. Backup copies come close to it: without them the others wait for every portion that
the slow worker has started.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, ratio, seconds
from benchmarks.sandbox import Dlctl, sandbox

CHAPTER = "straggler"
WORKERS, SLOWER, BATCH_S, ASKED = 8, 10.0, 0.1, 1.15
SPEED = WORKERS - 1 + 1 / SLOWER
TASK = '''"""Logistic regression with sleeping batches; the worker that creates `slow` is slower."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

HERE = Path(__file__).parent
BATCH_S, SLOWER = {batch_s}, {slower}


class Slow:
    def __init__(self):
        self.batch_s = BATCH_S
        self.times = None

    def model(self):
        return nn.Linear(16, 1)

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1280, 16, generator=generator)
        return TensorDataset(x, (x.sum(1, keepdim=True) > 0).float())

    def loss(self, model, batch):
        if self.times is None:
            self.times = (HERE / f"times-{{os.getpid()}}").open("a", buffering=1)
            try:
                (HERE / "slow").touch(exist_ok=False)
                self.batch_s = BATCH_S * SLOWER
            except FileExistsError:
                pass
        self.times.write(f"{{time.monotonic()}}\\n")
        time.sleep(self.batch_s)
        x, y = batch
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        self.times.write(f"{{time.monotonic()}}\\n")
        return loss


task = Slow()
'''
JOB = """[job]
name = "straggler"
task = "train.py:task"
stop = {{ epochs = 1000 }}
[algorithm]
name = "sandblaster"
iterations = {iterations}
gradient_norm_min = 0.0
[servers]
count = 2
[workers]
count = {workers}
batch_size = 8
threads = 1
[data]
portion_batches = 1
[checkpoints]
every_s = 0
"""


def measure(*, quick: bool) -> list[Figure]:
    slow_s, ideal_s = [], []
    for _ in range(1 if quick else 3):
        ideal_s.append(_took_s(1.0, quick) * WORKERS / SPEED)
        slow_s.append(_took_s(SLOWER, quick))
        print(f"  {seconds(slow_s[-1])}, ideal {seconds(ideal_s[-1])}", file=sys.stderr, flush=True)
    told = f"{WORKERS} workers, one {SLOWER:g} times slower, to the ideal"
    return [ratio(CHAPTER, told, slow_s, ideal_s, None if quick else ASKED)]


def _took_s(slower: float, quick: bool) -> float:
    """From the first batch to the end of the last required one."""
    with sandbox() as directory:
        (directory / "train.py").write_text(TASK.format(batch_s=BATCH_S, slower=slower))
        file = directory / "job.toml"
        file.write_text(JOB.format(iterations=1 if quick else 4, workers=WORKERS))
        Dlctl()("run", "--fresh", "-q", str(file))
        return _span_s(directory)


def _span_s(directory: Path) -> float:
    found = [np.array(path.read_text().split(), float) for path in directory.glob("times-*")]
    # Without the slow worker's last batch: no worker waits for it.
    ends = sorted(times[-1] for times in found)
    return float(ends[-2] - min(times[0] for times in found))
