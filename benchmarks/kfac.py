"""K-FAC against SGD with a momentum: epochs to one accuracy, time of a step, floats that are sent.

The first 10,000 images of Fashion-MNIST, a network of 784, 128 and 10, two workers with batches of
256, five seeds. Both rates, and K-FAC's damping, are tuned by hand on another seed. Accuracy is
that of the 10,000 test images, every quarter of an epoch. A step is timed in one process, in turns,
as a mean over the steps from one eigendecomposition to the next.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.sandbox import Dlctl, sandbox
from daemons.worker import inner_optimizer
from daemons.worker.kfac.engine import KfacEngine
from daemons.worker.replica import TorchReplica
from daemons.worker.stepper import Stepper
from daemons.worker.task.user_task import Task, calling
from dlctl.algorithms.engines import EnginePlace, Operations
from dlctl.algorithms.methods.kfac import Options
from dlctl.algorithms.methods.kfac_shapes import Packing
from dlctl.job.config import Choice

CHAPTER = "kfac"
EXAMPLE = Path(__file__).parents[1] / "examples" / "fashion_mnist"
SEEDS, EPOCHS_MAX, TARGET = 5, 12, 0.84
RUN_S_MAX = 900.0
BATCH, WORKERS = 256, 2
FACTOR_STEPS, EIGEN_STEPS = 1, 10
SGD = ('name = "allreduce"', 0.1)
KFAC = (
    f'name = "kfac"\nfactor_steps = {FACTOR_STEPS}\neigen_steps = {EIGEN_STEPS}\n'
    "damping = 0.1\nkl_clip = 0.01",
    0.3,
)
"""Keys of [algorithm], and the rate."""
TASK = """import fashion_data
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class Clothes:
    tests = None

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def dataset(self):
        return of("train")

    def loss(self, model, batch):
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def evaluate(self, model):
        self.tests = self.tests or of("t10k")
        images, labels = self.tests.tensors
        return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


def of(part):
    images, labels = fashion_data.load(part)
    images = (torch.from_numpy(images[:10_000].copy()).float() / 255 - 0.286) / 0.353
    return TensorDataset(images, torch.from_numpy(labels[:10_000].copy()).long())


task = Clothes()
"""
JOB = """[job]
name = "{name}"
task = "clothes.py:task"
seed = {seed}
stop = {{ epochs = {epochs}, target = "accuracy >= {target}" }}
[algorithm]
{algorithm}
[inner]
name = "sgd"
lr = {lr}
momentum = 0.9
[workers]
count = {workers}
batch_size = {batch}
device = "cpu"
threads = 1
[data]
portion_batches = 1
[evaluation]
every_epochs = 0.25
[checkpoints]
every_s = 0
"""


def measure(*, quick: bool) -> list[Figure]:
    return [_epochs(quick=quick), _step(quick=quick), *_floats()]


# ---------------------------------------------------------------- epochs


def _epochs(*, quick: bool) -> Figure:
    figure = Figure(CHAPTER, f"epochs to accuracy {TARGET}, to SGD", "x", (), None if quick else 1)
    with sandbox() as directory:
        shutil.copy(EXAMPLE / "fashion_data.py", directory)
        (directory / "clothes.py").write_text(TASK)
        try:
            both = [
                [_run(directory, name, how, seed, quick=quick) for seed in range(_seeds(quick))]
                for name, how in (("kfac", KFAC), ("sgd", SGD))
            ]
        except RuntimeError as error:
            return Figure(CHAPTER, figure.what, "x", (), figure.asked, failed=str(error)[-300:])
    ratios = tuple(ours / theirs for ours, theirs in zip(*both, strict=True))
    detail = " against ".join(
        ", ".join(f"{epochs:.2f}" for epochs in of_seeds) for of_seeds in both
    )
    return Figure(CHAPTER, figure.what, "x", ratios, figure.asked, detail)


def _seeds(quick: bool) -> int:
    return 1 if quick else SEEDS


def _run(directory: Path, name: str, how: tuple[str, float], seed: int, *, quick: bool) -> float:
    """Epochs until the accuracy is reached; `EPOCHS_MAX` if it is not. Raises RuntimeError."""
    file, dlctl = directory / f"{name}-{seed}.toml", Dlctl(limit_s=RUN_S_MAX)
    file.write_text(
        JOB.format(
            name=file.stem,
            seed=seed,
            epochs=1 if quick else EPOCHS_MAX,
            target=TARGET,
            algorithm=how[0],
            lr=how[1],
            workers=WORKERS,
            batch=BATCH,
        )
    )
    dlctl("run", "--fresh", "-q", str(file))
    status = json.loads(dlctl("status", "--json", "-j", str(file)))
    return float(status["data_epoch"])  # The run ends a few steps after that evaluation.


# ---------------------------------------------------------------- a step


class _Clothes:
    """A task without its data."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def dataset(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)


def _stepper() -> Stepper:
    replica = TorchReplica(Task(_Clothes()), device="cpu", seed=0)
    options = {"lr": 0.01, "momentum": 0.9}
    inner = inner_optimizer.make(Choice(name="sgd", options=options), replica.values)
    return Stepper(replica, None, inner)


def _cycle_of_sgd(batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    stepper = _stepper()

    def cycle() -> None:
        for _ in range(EIGEN_STEPS):
            gradient = stepper.step([(batch, 1.0)], samples=len(batch[1])).gradient
            stepper.along(np.array(gradient), 0.01)

    return cycle


def _cycle_of_kfac(batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    stepper = _stepper()
    engine = KfacEngine(EnginePlace(stepper.replica, Options()))
    stepper.tell(Operations(engine, "kfac", calling))
    mine = np.ones((len(engine.layers), 2), np.uint8)
    numbers, terms = np.array([0.1, 0.95, 0.01], np.float32), np.array([0.1, 0.01, 0.01])

    def cycle() -> None:
        for step in range(EIGEN_STEPS):
            if step % FACTOR_STEPS == 0:
                engine.record()
            gradient = stepper.step([(batch, 1.0)], samples=len(batch[1])).gradient
            if step % FACTOR_STEPS == 0:
                engine.fold(*engine.given_factors(), numbers)
            if step == 0:
                engine.renew()
                engine.take_eigens(*engine.given_eigens(mine))
            stepper.along(engine.along_opt(np.array(gradient), terms)[0], 0.01)

    return cycle


def _step(*, quick: bool) -> Figure:
    """Of one replica alone: what is not shared between replicas."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    batch = torch.randn(BATCH, 784, generator=rng), torch.randint(10, (BATCH,), generator=rng)
    ours_s, bare_s = take_turns(1 if quick else 5, _cycle_of_kfac(batch), _cycle_of_sgd(batch))
    torch.set_num_threads(threads)
    each = [[total / EIGEN_STEPS for total in side] for side in (ours_s, bare_s)]
    return ratio(CHAPTER, "a step of one replica, to SGD", *each)


# ---------------------------------------------------------------- floats


def _floats() -> list[Figure]:
    """What a replica gives to the sums of a step, beside the gradient."""
    replica = _stepper().replica
    packing: Packing = KfacEngine(EnginePlace(replica, Options())).packing
    found = []
    for factors, eigens in ((1, 10), (10, 100)):
        opt = packing.factor_size / factors + packing.eigen_size / eigens
        lw = packing.factor_size / factors + packing.update_size
        found.append(
            Figure(
                CHAPTER,
                f"floats of a step, opt to lw, factors {factors}, eigens {eigens}",
                "x",
                (opt / lw,),
                detail=f"{opt / 1e3:,.0f} k against {lw / 1e3:,.0f} k",
            )
        )
    return found
