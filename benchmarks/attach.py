"""A step of a training loop with `dlctl.attach`, within a round, against the same loop without it.

    python -m benchmarks.attach [--quick]    prints the figures as JSON, measured on one core

10,000,000 parameters, batches of 8, SGD, rounds of 50 steps. The exchange at the end of a round is
not a part of it, so the loop runs alone: what it calls within a round is the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dlctl
from benchmarks.figures import Figure, ratio, take_turns

CHAPTER = "attach"
ASKED = 1.02
WIDTH, LAYERS = 1_581, 4
BATCH, STEPS = 8, 50


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
    return [Figure(**found | {"values": tuple(found["values"])}) for found in json.loads(printed)]


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
