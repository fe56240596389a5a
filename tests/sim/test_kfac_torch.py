"""K-FAC of torch models in virtual time: whatever the number of workers, the placement and the
batches of a step, it is one trajectory, and that of a loop in one process.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulated import job_file
from torch import Tensor, nn
from torch.nn import functional

from daemons.simulator.compute import TorchCompute
from daemons.simulator.costs import Costs, Durations, Lognormal
from daemons.worker.building import build
from dlctl.job.config import Data, Gradients, Job, JobFile, Stop
from dlctl.sim.simulation import Simulation

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
STEPS, BATCH, LR = 50, 64, 0.05
"""Together."""
OPTIONS = {"factor_steps": 1, "eigen_steps": 5, "damping": 0.03}
OTHERS = """

class Even(Digits):
    def dataset(self):
        return TensorDataset(self.train_images[:1280], self.train_labels[:1280])


class Convolved(Even):
    def model(self):
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(),
            nn.Conv2d(6, 8, 3, stride=2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(72, 10),
        )


class Flat(Even):
    def model(self):
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


small_cnn, small_mlp = Convolved(), Flat()
"""
"""Smaller models, and steps of equal size."""
MODELS = ("small_mlp", "small_cnn")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    (folder / "digits.npz").write_bytes((DIGITS / "digits.npz").read_bytes())
    (folder / "train.py").write_text((DIGITS / "train.py").read_text() + OTHERS)
    return folder / "train.py"


def job_of(task: Path, model: str, workers: int, accumulate: int = 1, **options: Any) -> JobFile:
    job = job_file(
        workers, 0, algorithm=("kfac", OPTIONS | options),
        gradient=Gradients(accumulate=accumulate), inner=("sgd", {"lr": LR, "momentum": 0.9}),
        batch_size=BATCH // workers // accumulate,
    )  # fmt: skip
    stop = Stop(samples=STEPS * BATCH)
    data = Data(portion_batches=1, lease_ahead_s=0.0)
    named = Job(name="digits", task=f"{task}:{model}", stop=stop)
    return replace(job, job=named, data=data, workers=replace(job.workers, device="cpu", threads=1))


def trained(job: JobFile, folder: Path) -> np.ndarray[Any, Any]:
    steps = Lognormal(median_s=0.1)
    costs = Costs(Durations(step=steps, evaluation=steps), 0)
    outcome = Simulation(job, TorchCompute(job, folder, costs)).run()
    assert outcome.state == "finished", outcome.reason
    return outcome.weights


@cache
def alone(task: Path, model: str) -> np.ndarray[Any, Any]:
    return trained(job_of(task, model, 1), task.parent)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("workers", "accumulate", "placement"),
    [(1, 4, "opt"), (2, 1, "opt"), (4, 1, "opt"), (1, 1, "lw"), (2, 2, "lw"), (4, 1, "lw")],
)
def test_it_is_one_trajectory(task, model, workers, accumulate, placement):
    job = job_of(task, model, workers, accumulate, placement=placement)
    found, expected = trained(job, task.parent), alone(task, model)
    assert np.abs(found - expected).max() < 1e-4


def inputs_of(module: nn.Module, given: Tensor) -> Tensor:
    """float64[rows, a]: what the layer multiplies its weight with, and the 1 of its bias."""
    if isinstance(module, nn.Conv2d):
        given = functional.unfold(
            given, module.kernel_size, padding=module.padding, stride=module.stride
        ).transpose(1, 2)
    given = given.reshape(-1, given.shape[-1]).double()
    ones = [torch.ones(len(given), 1, dtype=torch.float64)] * (module.bias is not None)
    return torch.cat([given, *ones], 1)


def matrix_of(module: nn.Module) -> Tensor:
    """float64[g, a]: its gradient."""
    parts = [module.weight.grad.flatten(1)]
    parts += [module.bias.grad[:, None]] if module.bias is not None else []
    return torch.cat(parts, 1).double()


class Dense:
    """One layer of the loop: its factors, and the inverse of their product."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        module.register_forward_hook(self._keep)
        columns = module.weight[0].numel() + (module.bias is not None)
        self.a = torch.eye(columns, dtype=torch.float64)
        self.g = torch.eye(len(module.weight), dtype=torch.float64)

    def _keep(self, _: Any, given: Any, output: Tensor) -> None:
        self.inputs, self.output = inputs_of(self.module, given[0].detach()), output
        output.retain_grad()

    def fold(self) -> None:
        gradients = (
            self.output.grad.flatten(2) if self.output.dim() == 4 else self.output.grad[..., None]
        )
        gradients = gradients.transpose(1, 2).reshape(-1, len(self.g)).double()
        self.a = 0.95 * self.a + 0.05 * self.inputs.T @ self.inputs / len(self.inputs)
        self.g = 0.95 * self.g + 0.05 * BATCH * gradients.T @ gradients

    def invert(self) -> None:
        fisher = torch.kron(self.g, self.a)
        fisher.diagonal().add_(OPTIONS["damping"])
        self.inverse = torch.linalg.inv(fisher)

    def along(self) -> Tensor:
        gradient = matrix_of(self.module)
        return (self.inverse @ gradient.reshape(-1)).view(gradient.shape)


@pytest.mark.long
@pytest.mark.oracle("kfac", "a loop of torch with dense inverses")
@pytest.mark.parametrize("model", MODELS)
def test_it_is_a_loop_of_torch_with_dense_inverses(task, model, agree):
    """Over 50 steps."""
    built = build(job_of(task, model, 1), 0, 0)
    module = built.stepper.replica.model
    layers = [Dense(each) for each in module.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    script = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    for step in range(STEPS):
        epoch, number = divmod(step, 1280 // BATCH)
        place = number * BATCH
        (((images, labels), _),) = built.loader.step(epoch, place, place + BATCH, 0).batches
        script.zero_grad()
        functional.cross_entropy(module.train()(images), labels).backward()
        for layer in layers:
            layer.fold()
            if step % OPTIONS["eigen_steps"] == 0:
                layer.invert()
        every = [layer.along() for layer in layers]
        changes = [(p * matrix_of(x.module)).sum() for p, x in zip(every, layers, strict=True)]
        nu = min(1.0, (0.001 / abs(LR**2 * float(sum(changes)))) ** 0.5)
        for layer, along in zip(layers, every, strict=True):
            weight, bias = layer.module.weight, layer.module.bias
            columns = weight[0].numel()
            weight.grad.copy_(nu * along[:, :columns].reshape(weight.shape))
            if bias is not None:
                bias.grad.copy_(nu * along[:, -1])
        script.step()
    theirs = torch.cat([each.detach().reshape(-1) for each in module.parameters()])
    agree(alone(task, model), theirs.numpy(), atol=1e-4)
