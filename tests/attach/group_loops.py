"""Programs that several processes run as one replica, and torchrun's way to start them."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

from workplace import Workplace

GROUP = '''"""One replica of several processes: `train.py ddp`, or fsdp; or one process: one."""

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dlctl

KIND, OPTIMIZER, PAUSE_S = sys.argv[1], sys.argv[2], float(sys.argv[3])
RANK = int(os.environ.get("RANK", 0))


def model_of(kind):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 3))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        return fully_shard(model)
    return model


def evaluate(model):
    with torch.no_grad():
        return {{"val": cross_entropy(model(POINTS), LABELS)}}


generator = torch.Generator().manual_seed(1)
POINTS = torch.randn({samples}, 2, generator=generator)
LABELS = torch.randint(0, 3, ({samples},), generator=generator)
if KIND != "one":
    dist.init_process_group("gloo")
model = model_of(KIND)
if OPTIMIZER == "adamw":
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# here
run = dlctl.attach(model, optimizer, evaluate, group=KIND != "one")
if OPTIMIZER == "mean":
    optimizer = run.optimizer(model, optimizer)
with run:
    for points, labels in run.loader(TensorDataset(POINTS, LABELS), {batch_size}):
        loss = cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        threading.Event().wait(PAUSE_S)
        run.step(loss=loss)
        # in the loop
# In one write: the lines of the ranks must not mix.
made = f"{{run.steps}} steps with {{run.samples}} samples: {{run.ended}}"
sys.stdout.write(f"rank {{RANK}} has made {{made}}\\n")
sys.stdout.flush()
run.save(f"{{KIND}}.pt")
if KIND != "one":
    dist.destroy_process_group()  # Else gloo's thread may abort the process while it exits.
'''

ACCOUNT = '''"""Adds 1 to a number of its own for each sample: what is lost or repeated is seen."""

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dlctl

KIND, WAY, PAUSE_S, VICTIM, PHASE = sys.argv[1:]
SAMPLES = 256


class Account(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, rows):
        return -self.cells[rows].sum() * dist.get_world_size()


class Kept:
    """A scheduler: asked for its state when the run saves."""

    def state_dict(self):
        pass_through("save")
        return {}

    def load_state_dict(self, state):
        pass


def pass_through(phase):
    first = os.environ["DLCTL_NAME"] == "worker-0" and os.environ["DLCTL_INCARNATION"] == "1"
    if first and phase == PHASE and os.environ["RANK"] == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)


def evaluate(model):
    pass_through("evaluation")
    return {"filled": (whole(model) != 0).float().mean()}


def whole(model):
    cells = next(model.parameters())
    return cells.full_tensor() if KIND == "fsdp" else cells


dist.init_process_group("gloo")
model = Account()
model = DistributedDataParallel(model) if KIND == "ddp" else fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
pass_through("join")
run = dlctl.attach(model, optimizer, evaluate, scheduler=Kept(), group=True)
if WAY == "gradients":
    optimizer = run.optimizer(model)
with run:
    for (rows,) in run.loader(TensorDataset(torch.arange(SAMPLES)), 4):
        loss = model(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        threading.Event().wait(float(PAUSE_S))
        if run.steps == 5:
            pass_through("step")
        run.step(loss=loss)
'''


def write_group(place: Workplace, *, samples: int = 256, batch_size: int = 8) -> None:
    place.task(GROUP.format(samples=samples, batch_size=batch_size))


class Ended(NamedTuple):
    code: int
    said: str


def torchrun(place: Workplace, processes: int, *arguments: str, timeout_s: float = 90.0) -> Ended:
    """Run train.py by torchrun, without a run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes)]
    return _ended(place, [*command, "train.py", *arguments], timeout_s)


def alone(place: Workplace, *arguments: str, timeout_s: float = 90.0) -> Ended:
    """Run train.py by Python, without a run."""
    return _ended(place, [sys.executable, "train.py", *arguments], timeout_s)


def _ended(place: Workplace, command: list[str], timeout_s: float) -> Ended:
    ended = subprocess.run(
        command, cwd=place.path, env=place.env | {"OMP_NUM_THREADS": "1"}, timeout=timeout_s,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return Ended(ended.returncode, ended.stdout)
