"""A step of a training loop with `dlctl.attach`, within a round, against the same loop without it.

    python -m benchmarks.attach [--quick]    prints the figures as JSON, measured on one core

10,000,000 parameters, batches of 8, SGD, rounds of 50 steps. The exchange at the end of a round is
not a part of it, so the loop runs alone: what it calls within a round is the same.

With the exchange: a step of four workers as scripts, against the same model and data as a task. The
rounds are short, so that the exchange is a large part of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dlctl
from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.sandbox import Dlctl, sandbox

CHAPTER = "attach"
ASKED = 1.02
ASKED_OF_RUN = 1.05
"""A step with exchanges: no slower than a task's, but for what runs differ by."""
WIDTH, LAYERS = 1_581, 4
BATCH, STEPS = 8, 50
WORKERS, LOCAL_STEPS = 4, 5
WARM_UP, TIMED = 2 * LOCAL_STEPS, 6 * LOCAL_STEPS
BOTH = """
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dlctl


class Wide:
    def __init__(self):
        self.steps = 0

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear({width}, {width}) for _ in range({layers})))

    def dataset(self):
        return TensorDataset(torch.ones(100_000, 1).expand(-1, {width}))

    def loss(self, model, batch):
        self.steps += 1
        if self.steps == {warm_up}:
            self.began = time.perf_counter()
        elif self.steps == {warm_up} + {timed}:
            step_s = (time.perf_counter() - self.began) / {timed}
            Path(f"{{__file__}}.{{os.getpid()}}.step_s").write_text(str(step_s))
        return model(batch[0]).square().mean()


task = Wide()

if __name__ == "__main__":
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run = dlctl.attach(model, optimizer)
    with run:
        for batch in run.loader(task.dataset(), {batch}):
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
"""
"""A program that is a task as well as a script."""
JOB = """[job]
name = "bench"
{program}
stop = {{ steps = {steps} }}
[algorithm]
name = "diloco"
local_steps = {local_steps}
{inner}
[servers]
count = 1
[workers]
count = {workers}
batch_size = {batch}
threads = 1
[checkpoints]
every_s = 0
[evaluation]
every_epochs = 0
"""
AS_TASK = 'task = "train.py:task"', '[inner]\nname = "sgd"\nlr = 1e-6'
AS_SCRIPT = 'script = "train.py"', ""


class Endless(Dataset[Tensor]):
    """The same sample again and again."""

    def __init__(self, width: int) -> None:
        self._sample = torch.ones(width)

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> Tensor:
        return self._sample


def measure(*, quick: bool) -> list[Figure]:
    command = [sys.executable, "-m", "benchmarks.attach", *(["--quick"] if quick else [])]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    alone = [Figure(**found | {"values": tuple(found["values"])}) for found in json.loads(printed)]
    return [*alone, _with_exchange(quick=quick)]


def _with_exchange(*, quick: bool) -> Figure:
    width, rounds = (16, 1) if quick else (WIDTH, 3)
    with sandbox() as directory:
        (directory / "train.py").write_text(
            BOTH.format(width=width, layers=LAYERS, warm_up=WARM_UP, timed=TIMED, batch=BATCH)
        )
        pairs = [
            [_step_s(directory, *kind) for kind in (AS_SCRIPT, AS_TASK)] for _ in range(rounds)
        ]
    scripts_s, tasks_s = zip(*pairs, strict=True)
    size = LAYERS * width * (width + 1)
    what = f"a step of {WORKERS} workers, {size:,} parameters, with exchanges, script / task"
    return ratio(CHAPTER, what, scripts_s, tasks_s, None if quick else ASKED_OF_RUN)


def _step_s(directory: Path, program: str, inner: str) -> float:
    """Of the median worker of a whole run."""
    for file in directory.glob("*.step_s"):
        file.unlink()
    steps = WORKERS * (WARM_UP + TIMED + 2 * LOCAL_STEPS)
    (directory / "job.toml").write_text(
        JOB.format(
            program=program, inner=inner, steps=steps, local_steps=LOCAL_STEPS, workers=WORKERS,
            batch=BATCH,
        )
    )  # fmt: skip
    Dlctl()("run", "--fresh", "-q", str(directory / "job.toml"))
    return median(float(file.read_text()) for file in directory.glob("*.step_s"))


def _measure(*, quick: bool) -> list[Figure]:
    width, rounds = (16, 1) if quick else (WIDTH, 5)
    data = Endless(width)
    model, optimizer = _model(width)
    run = dlctl.attach(model, optimizer)
    attached = _steps(model, optimizer, run.loader(data, BATCH), run.step)
    bare = _steps(*_model(width), DataLoader(data, BATCH), _nothing)
    ours_s, bare_s = take_turns(rounds, partial(_round, attached), partial(_round, bare))
    size = sum(parameter.numel() for parameter in model.parameters())
    what = f"{STEPS} steps of {size:,} parameters, attached / not"
    return [ratio(CHAPTER, what, ours_s, bare_s, None if quick else ASKED)]


def _model(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


def _steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Tensor],
    done: Callable[..., Any],
) -> Iterator[None]:
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done(loss=loss)
        yield


def _round(steps: Iterator[None]) -> None:
    for _ in range(STEPS):
        next(steps)


def _nothing(loss: Tensor) -> None:
    """There is no run."""


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print(json.dumps([asdict(figure) for figure in _measure(quick="--quick" in sys.argv)]))
