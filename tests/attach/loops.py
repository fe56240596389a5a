"""Programs with a training loop of their own, and jobs that run them as their workers."""

from __future__ import annotations

from workplace import Workplace

CLOUDS = '''
import itertools
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dlctl

PAUSE_S = {pause_s}
HERE = Path(__file__).parent


def clouds(points, seed):
    """Two clouds of points that overlap: no model comes to a loss of 0."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (points,), generator=generator)
    noise = 1.2 * torch.randn(points, 2, generator=generator)
    return TensorDataset(noise + (2 * label[:, None] - 1), label)


class Clouds:
    def model(self):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def dataset(self):
        return clouds({samples}, seed=1)

    def loss(self, model, batch):
        threading.Event().wait(PAUSE_S)
        points, label = batch
        return functional.cross_entropy(model(points), label)

    def evaluate(self, model):
        with torch.no_grad():
            points, label = clouds(2048, seed=2).tensors
            return {{"val": functional.cross_entropy(model(points), label)}}


task = Clouds()
'''
"""All that a `task` is, and a loop needs."""

LOOP = """

def main(way="own", *_):
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr={lr})
    run = dlctl.attach(model, optimizer, task.evaluate)
    if way == "gradients":
        optimizer = run.optimizer(model)
    elif way == "mean":
        optimizer = run.optimizer(model, optimizer)
    with run:
        for batch in run.loader(task.dataset(), {batch_size}):
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
    print("the run is", run.ended)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def write_loop(
    place: Workplace,
    loop: str = LOOP,
    *,
    samples: int = 256,
    pause_s: float = 0.0,
    batch_size: int = 8,
    lr: float = 0.05,
) -> None:
    """Write train.py, which is a task as well as a script."""
    loop = loop.replace("{batch_size}", str(batch_size)).replace("{lr}", str(lr))
    place.task(CLOUDS.format(samples=samples, pause_s=pause_s) + loop)


def script(*args: str) -> str:
    """The lines of [job] that make train.py a script."""
    return f'script = "train.py"\nargs = {list(args)}'.replace("'", '"')


DYING = '''"""Keeps an account (`tests/faults/ledger_task.py`), and dies in each of its phases."""

import os
import signal
import sys
import threading

import torch

import dlctl
from ledger_task import task

PHASES, VICTIM = sys.argv[1:], "worker-0"
PAUSE_S = 0.05


def pass_through(phase):
    """Each life of the victim ends in a phase of its own; the last one goes on."""
    life = int(os.environ["DLCTL_INCARNATION"]) - 1
    if os.environ["DLCTL_NAME"] == VICTIM and PHASES[life : life + 1] == [phase]:
        if phase == "join" or run.steps >= 4:
            os.kill(os.getpid(), signal.SIGKILL)


def evaluate(model):
    pass_through("evaluation")
    return {"filled": (model.cells != 0).float().mean()}


model = task.model()
run = dlctl.attach(model, evaluate=evaluate)
optimizer = run.optimizer(model)
pass_through("join")
with run:
    for batch in run.loader(task.dataset(), 8):
        threading.Event().wait(PAUSE_S)
        loss = task.loss(model, batch)
        loss.backward()
        pass_through("step")
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        pass_through("push")
'''
