"""`hogwild` on sparse logistic regression: a step against a bare torch loop, two workers against
one, no locks against a lock for each step; and a dense model, which it is not made for.

Bags of words, seeded; each document has a few words of many, so two steps rarely write to the same
rows. All sides train the same batches with the same code, which also times them. Lost additions of
two processes are counted in bare memory, for sparse rows and for a dense vector.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, ratio
from benchmarks.sandbox import Dlctl, sandbox

CHAPTER = "hogwild"
ASKED_STEP, ASKED_SPEED_UP, ASKED_LOSS = 1.2, 1.3, 1.01
EPOCHS, DENSE_EPOCHS = 8, 2
TASK = '''"""Bags of words, or a dense model beside them; and a clock."""

import os
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

WORDS, DOCUMENTS, LENGTH, BATCH = 100_000, 64_000, 60, 32
EVERY = 500


class Clocked:
    steps = 0

    def tick(self):
        if self.steps % EVERY == 0:
            with open(f"{__file__}.{os.getpid()}", "a") as file:
                file.write(f"{self.steps} {time.perf_counter()}\\n")
        self.steps += 1

    def evaluate(self, model):
        return {"loss": self.loss_of(model, self.dataset().tensors)}

    def loss(self, model, batch):
        self.tick()
        return self.loss_of(model, batch)

    def loss_of(self, model, batch):
        inputs, labels = batch
        return functional.binary_cross_entropy_with_logits(model(inputs)[:, 0], labels)


class Bags(Clocked):
    def model(self):
        bag = nn.EmbeddingBag(WORDS, 1, mode="sum", sparse=True)
        nn.init.zeros_(bag.weight)
        return bag

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        words = (WORDS * torch.rand(DOCUMENTS, LENGTH, generator=generator) ** 2).long()
        weights = torch.randn(WORDS, generator=generator)
        return TensorDataset(words, (weights[words].sum(1) > 0).float())


class Dense(Clocked):
    def model(self):
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(DOCUMENTS, 64, generator=generator)
        return TensorDataset(inputs, (inputs.prod(1) > 0).float())


task, dense = Bags(), Dense()
'''
BARE = '''"""The same by torch alone: task, processes, epochs, and "locks" for one at each step."""

import contextlib
import sys

import torch
from torch import multiprocessing

import train

LR = float(sys.argv[5])


def work(number, count, epochs, task, model, lock):
    torch.set_num_threads(1)
    tensors = task.dataset().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(train.DOCUMENTS, generator=generator).split(train.BATCH)
        for rows in order[number::count]:
            batch = [tensor.index_select(0, rows) for tensor in tensors]
            with lock:
                optimizer.zero_grad()
                loss = task.loss(model, batch)
                loss.backward()
                optimizer.step()
                loss.item()


if __name__ == "__main__":
    task, count, epochs = getattr(train, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    model = task.model().share_memory()
    lock = multiprocessing.Lock() if sys.argv[4] == "locks" else contextlib.nullcontext()
    context = multiprocessing.get_context("fork")
    rest = (count, epochs, task, model, lock)
    processes = [context.Process(target=work, args=(n, *rest)) for n in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
'''
LOST = '''"""Of additions of two processes, the part that is lost: sparse rows, a dense vector."""

import json
import sys

import torch
from torch import multiprocessing

import train

STEPS = int(sys.argv[1])


def add(number, x, ready, is_sparse):
    torch.set_num_threads(1)
    words = train.task.dataset().tensors[0] if is_sparse else None
    ready.wait()
    for step in range(STEPS):
        if is_sparse:
            at = words[(2 * step + number) * 32 % 60_000 :][:32].reshape(1, -1)
            x.add_(torch.sparse_coo_tensor(at, torch.ones(at.numel()), x.shape))
        else:
            x.add_(1.0)


def lost(is_sparse):
    context = multiprocessing.get_context("fork")
    x, ready = torch.zeros(train.WORDS).share_memory_(), context.Barrier(2)
    both = [context.Process(target=add, args=(n, x, ready, is_sparse)) for n in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    each = 32 * train.LENGTH if is_sparse else train.WORDS
    return 1 - float(x.double().sum()) / (2 * STEPS * each)


if __name__ == "__main__":
    print(json.dumps([lost(True), lost(False)]))
'''
JOB = """[job]
name = "hogwild"
task = "train.py:{task}"
stop = {{ epochs = {epochs} }}
[algorithm]
name = "hogwild"
steps_at_once = 100
[inner]
name = "sgd"
lr = {lr}
[workers]
count = {workers}
batch_size = 32
threads = 1
[data]
portion_batches = 200
[checkpoints]
every_s = 0
[evaluation]
every_epochs = 0
"""
LR = {"task": 2.0, "dense": 0.05}


def measure(*, quick: bool) -> list[Figure]:
    epochs = {"task": 2 if quick else EPOCHS, "dense": DENSE_EPOCHS}
    sides: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for _ in range(1 if quick else 3):
        for task, workers in (("task", 1), ("task", 2), ("dense", 1), ("dense", 2)):
            name = f"{task} {workers}"
            step_s, loss = _dlctl(task, workers, epochs[task])
            sides.setdefault(name, []).append(step_s)
            losses.setdefault(name, []).append(loss)
        for task, workers, how in (("task", 1, "free"), ("task", 2, "locks"), ("dense", 1, "free")):
            step_s = _bare(task, workers, epochs[task], how)
            sides.setdefault(f"{task} {workers} {how}", []).append(step_s)
    sparse, dense = _lost(200 if quick else 4000)

    def against(what: str, ours: str, bare: str, asked: float | None) -> Figure:
        return ratio(CHAPTER, what, sides[ours], sides[bare], None if quick else asked)

    apart = tuple(b / a for a, b in zip(losses["task 1"], losses["task 2"], strict=True))
    return [
        against("a sparse step / bare torch", "task 1", "task 1 free", ASKED_STEP),
        against("sparse, 2 workers / 1", "task 2", "task 1", 1 / ASKED_SPEED_UP),
        against("sparse, 2 workers / 2 processes with locks", "task 2", "task 2 locks", 1.0),
        Figure(CHAPTER, "loss after as many epochs, 2 workers / 1", "x", apart,
               None if quick else ASKED_LOSS),
        against("a dense step / bare torch", "dense 1", "dense 1 free", None),
        against("dense, 2 workers / 1", "dense 2", "dense 1", None),
        Figure(CHAPTER, "additions lost of 2 processes, sparse rows", "%", (100 * sparse,)),
        Figure(CHAPTER, "additions lost of 2 processes, a dense vector", "%", (100 * dense,)),
    ]  # fmt: skip


def _dlctl(task: str, workers: int, epochs: int) -> tuple[float, float]:
    """(seconds per step of all workers together, final loss)"""
    with sandbox() as directory:
        (directory / "train.py").write_text(TASK)
        file = directory / "job.toml"
        file.write_text(JOB.format(task=task, workers=workers, epochs=epochs, lr=LR[task]))
        dlctl = Dlctl()
        dlctl("run", str(file))
        status: dict[str, Any] = json.loads(dlctl("status", "--json", "-j", str(file)))
        return _step_s(directory), float(status["evaluation"]["loss"])


def _bare(task: str, workers: int, epochs: int, how: str) -> float:
    with sandbox() as directory:
        _script(directory, BARE, task, str(workers), str(epochs), how, str(LR[task]))
        return _step_s(directory)


def _lost(steps: int) -> tuple[float, float]:
    with sandbox() as directory:
        sparse, dense = json.loads(_script(directory, LOST, str(steps)))
        return float(sparse), float(dense)


def _script(directory: Path, text: str, *arguments: str) -> str:
    (directory / "train.py").write_text(TASK)
    (directory / "script.py").write_text(text)
    command = [sys.executable, "script.py", *arguments]
    ended = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    return ended.stdout


def _step_s(directory: Path) -> float:
    """Of all processes together, from what each recorded after its first steps."""
    per_s = 0.0
    for path in directory.glob("train.py.*"):
        steps, times = np.loadtxt(path)[1:].T
        per_s += (steps[-1] - steps[0]) / (times[-1] - times[0])
    return 1 / per_s
