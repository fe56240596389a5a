"""A worker against plain torch with the same optimiser: its peak memory, and the time of its steps.

Both sides train the same task with AdamW in one process and one thread; the worker runs with one
server and DiLoCo. Memory is the peak over two rounds and the final checkpoint, beyond that of plain
torch, in copies of the model; the memory of a run with a tiny model, dlctl itself, is subtracted.
The steps are those of the GPT of `examples/chargpt`, timed in the task by the same code on both
sides, including everything between steps: data, pushes, fetches.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.figures import Figure, ratio
from benchmarks.sandbox import Dlctl, sandbox

CHAPTER = "replica"
EXAMPLE = Path(__file__).parents[1] / "examples" / "chargpt"
COPIES_ASKED = 1.0
STEP_ASKED = 1.10
WARM_UP, TIMED = 30, 240
"""Steps of the GPT before and during the timing."""
ROUND = 30
WIDTHS = 16, 5600
"""Of models of 2 kB and 251 MB."""

LARGE = '''"""Two large layers; what the process took at most is in a file when it ends."""
import atexit
import resource

import torch
from torch import nn

BATCH = 4


@atexit.register
def tell_peak():
    with open(__file__ + ".peak", "w") as file:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=file)


class Large:
    def model(self):
        return nn.Sequential(nn.Linear({width}, {width}), nn.Linear({width}, {width}))

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.TensorDataset(torch.randn(256, {width}, generator=generator))

    def loss(self, model, batch):
        (x,) = batch
        return (model(x) - x).square().mean()


task = Large()
'''
GPT = f'''"""The GPT of the example, and a clock."""
import sys
import time

sys.path.insert(0, {str(EXAMPLE)!r})
from task import task as example

BATCH = 32


class Timed(type(example)):
    steps = 0

    def loss(self, model, batch):
        if self.steps == {WARM_UP}:
            self.begun = time.perf_counter()
        if self.steps == {WARM_UP + TIMED}:
            with open(__file__ + ".step_s", "w") as file:
                print((time.perf_counter() - self.begun) / {TIMED}, file=file)
        self.steps += 1
        return super().loss(model, batch)


task = Timed()
'''
PLAIN = '''"""What a user would write."""
import resource
import sys

import torch
import train
from torch.utils.data import DataLoader

torch.set_num_threads(1)
model, steps = train.task.model(), int(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
while steps:
    for batch in DataLoader(train.task.dataset(), batch_size=train.BATCH, shuffle=True):
        optimizer.zero_grad()
        loss = train.task.loss(model, batch)
        loss.backward()
        optimizer.step()
        float(loss)
        steps -= 1
        if not steps:
            break
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
'''
JOB = """[job]
name = "bench"
task = "train.py:task"
stop = {{ steps = {steps} }}
[algorithm]
name = "diloco"
local_steps = {local_steps}
[inner]
name = "adamw"
lr = 1e-4
[servers]
count = 1
[workers]
count = 1
batch_size = {batch}
threads = 1
[checkpoints]
every_s = 0
[evaluation]
every_epochs = 0
"""


def measure(*, quick: bool) -> list[Figure]:
    with sandbox() as directory:
        memory = _memory(directory, 1 if quick else 3)
        rounds = [_step_s(directory) for _ in range(1 if quick else 5)]
    ours_s, bare_s = zip(*rounds, strict=True)
    what = "a step of the GPT, batches of 32"
    return [memory, ratio(CHAPTER, what, ours_s, bare_s, asked=STEP_ASKED)]


def _memory(directory: Path, rounds: int) -> Figure:
    bare, ours = [], []
    for width, times in zip(WIDTHS, (1, rounds), strict=True):
        (directory / "train.py").write_text(LARGE.format(width=width))
        bare.append(float(_plain(directory, 2 * ROUND)))
        job = JOB.format(steps=2 * ROUND, local_steps=ROUND, batch=4)
        ours.append([_worker_peak(directory, job) for _ in range(times)])
    small, large = (8 * width * (width + 1) for width in WIDTHS)
    ((of_dlctl,), peaks) = ours
    of_dlctl -= bare[0]
    copies = tuple((peak - bare[1] - of_dlctl) / (large - small) for peak in peaks)
    sides = zip(map(median, ours), bare, strict=True)
    detail = "; ".join(f"{one / 1e6:.0f} MB against {other / 1e6:.0f} MB" for one, other in sides)
    what = "peak of a worker beyond plain torch, in models"
    return Figure(CHAPTER, what, "", copies, asked=COPIES_ASKED, detail=detail)


def _worker_peak(directory: Path, job: str) -> float:
    """Peak resident bytes of the worker over a whole run, as it reports at its end."""
    (directory / "job.toml").write_text(job)
    peak = directory / "train.py.peak"
    peak.unlink(missing_ok=True)
    Dlctl()("run", "--fresh", "-q", str(directory / "job.toml"))
    return float(peak.read_text())


def _step_s(directory: Path) -> tuple[float, float]:
    """(seconds of a step of a worker, and of plain torch)"""
    (directory / "train.py").write_text(GPT)
    steps = WARM_UP + TIMED + ROUND
    (directory / "job.toml").write_text(JOB.format(steps=steps, local_steps=ROUND, batch=32))
    found = []
    for side in (lambda: Dlctl()("run", "--fresh", "-q", str(directory / "job.toml")),
                 lambda: _plain(directory, steps)):  # fmt: skip
        file = directory / "train.py.step_s"
        file.unlink(missing_ok=True)
        side()
        found.append(float(file.read_text()))
    ours, bare = found
    return ours, bare


def _plain(directory: Path, steps: int) -> str:
    (directory / "plain.py").write_text(PLAIN)
    command = [sys.executable, "plain.py", str(steps)]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout
