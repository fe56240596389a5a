"""A method that the coordinator drives, on real daemons: one trajectory, whoever works and dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from workplace import ENDLESS, Workplace

ITERATIONS = 6
ALGORITHM = f'name = "sandblaster"\niterations = {ITERATIONS}\ngradient_norm_min = 0.0'
BATCHES = 30
"""Of 64 samples, in a pass over the dataset."""
VICTIMS = ("coordinator", "server-1", "worker-1")
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "digits.npz"
TASK = '''
import threading

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

PAUSE_S = {pause_s}


class Digits:
    """Logistic regression of handwritten digits: ten classes, 64 pixels."""

    def model(self):
        return nn.Linear(64, 10)

    def dataset(self):
        with np.load("{data}") as file:
            pixels, digits = torch.tensor(file["pixels"]), torch.tensor(file["labels"])
        return TensorDataset(pixels.float() / 16, digits.long())

    def loss(self, model, batch):
        threading.Event().wait(PAUSE_S)
        pixels, digits = batch
        return functional.cross_entropy(model(pixels), digits)


task = Digits()
'''


@pytest.fixture(scope="module")
def alone(shared_place: Workplace) -> np.ndarray:
    return weights_after(shared_place, workers=1)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("workers", "victims"),
    [
        pytest.param(
            3, (), marks=pytest.mark.oracle("sandblaster", "1 worker, real digits: 3 workers")
        ),
        pytest.param(
            8, (), marks=pytest.mark.oracle("sandblaster", "1 worker, real digits: 8 workers")
        ),
        pytest.param(
            3,
            VICTIMS,
            marks=pytest.mark.oracle("sandblaster", "1 worker, real digits: 3 workers and kills"),
        ),
    ],
)
def test_the_trajectory_depends_neither_on_the_workers_nor_on_deaths(
    shared_place, alone, workers, victims, agree
) -> None:
    agree(weights_after(shared_place, *victims, workers=workers), alone, atol=1e-5)
    shared_place.nothing_left()


def weights_after(place: Workplace, *victims: str, workers: int) -> np.ndarray:
    """float32[d]: the parameters of a new run at its end."""
    place.task(TASK.format(data=DIGITS, pause_s=0.03 if victims else 0.0))
    place.job(stop=ENDLESS, workers=workers, servers=2, algorithm=ALGORITHM, batch_size=64)
    place.start("--fresh")
    for number, name in enumerate(victims):
        place.until_step(BATCHES * number + 10)
        os.kill(place.pid(name), signal.SIGKILL)
    place.until("its end", lambda: place.run().get("state") == "finished", timeout_s=90.0)
    figures = place.run()["method"]
    assert figures["iteration"] == ITERATIONS, place.story()
    assert figures["loss"] < 0.7
    deaths = [*place.events("lost"), *place.events("recover")]
    assert len(deaths) >= len(victims), place.story()
    checkpoint = max((place.directory / "ckpt").glob("*/manifest.json")).parent
    shards = [load_file(checkpoint / f"shard-{k}.safetensors")["w"] for k in (0, 1)]
    return np.concatenate(shards)
