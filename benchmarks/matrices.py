"""Optimisers of matrices on the servers: updates until the loss that AdamW ends with, and the time
of an update beside AdamW's and SGD's.

A small GPT on the text of `examples/chargpt`, `sync` with two workers and two servers in the
simulator: the roles, the model and its gradients are real, time is not, so the figures are the same
on any machine with the same torch. Each optimiser has the best of as many rates, found with seeds
of their own; the target of a seed is the validation loss that AdamW ends with. The schedule, the
batches and the initial values are the same for all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.figures import Figure
from benchmarks.sandbox import sandbox
from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.observe import history
from dlctl.ops import simulate, simulators
from dlctl.optim import on_shard
from dlctl.optim.matrices import kept_of
from dlctl.shards.base import Shard, Spec
from dlctl.shards.memory import InMemory
from dlctl.sim.request import SimulationRequest

CHAPTER = "matrices"
EXAMPLE = Path(__file__).parents[1] / "examples" / "chargpt"
SIZES = {"WIDTH, HEADS, LAYERS = 88, 4, 4": "WIDTH, HEADS, LAYERS = 32, 4, 2",
         "EVALUATED = 384": "EVALUATED = 64"}  # fmt: skip
WORKERS, BATCH, UPDATES, EVERY = 2, 8, 80, 4
SEEDS, TUNING_SEEDS = 5, (100, 101, 102)
NO_MATRICES = ["character.weight", "position.weight"]
RATES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "adamw": ({"beta2": 0.95, "weight_decay": 0.1}, (4e-3, 8e-3, 1.6e-2)),
    "muon": (
        {"weight_decay": 0.1, "beta2": 0.95, "adamw_lr_scale": 0.2, "elementwise": NO_MATRICES},
        (0.02, 0.04, 0.08),
    ),
    "soap": ({"weight_decay": 0.1}, (8e-3, 1.6e-2, 3.2e-2)),
}
"""Optimiser -> its options, and the rates that are tried."""
TIMED = ("sgd", "adamw", "muon", "soap", "shampoo", "lmo")
BARE = ("adamw", "sgd")
"""What the others are timed beside."""
FEWER_ASKED = 1.0
JOB = """[job]
name = "matrices"
task = "task.py:task"
stop = {{ steps = {steps} }}
[algorithm]
name = "sync"
[optimizer]
name = "adamw"
[schedule]
kind = "cosine"
warmup = "5%"
final = 0.1
[servers]
count = 2
[workers]
count = {workers}
batch_size = {batch}
threads = 1
[data]
portion_batches = 1
[evaluation]
every_steps = {every}
[checkpoints]
every_s = 0
"""
APPLIES = 20
"""Timed updates of each; SOAP and Shampoo have a slow one in ten."""
AT_A_TIME = 4
"""Simulations."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Threads of numpy's products that wait for each other would be measured, not the products."""

Losses = dict[int, float]
"""Update -> validation loss."""


def measure(*, quick: bool) -> list[Figure]:
    """quick: few updates, one seed, no tuning."""
    updates, seeds = (20, 1) if quick else (UPDATES, SEEDS)
    with _simulator(updates) as run:
        rates = {name: found[0] for name, (_, found) in RATES.items()}
        if not quick:
            tried = [
                Trial(name, rate, seed)
                for name, (_, of_name) in RATES.items()
                for rate in of_name
                for seed in TUNING_SEEDS
            ]
            rates = _best(run(tried))
        trials = [Trial(name, rates[name], seed) for name in RATES for seed in range(seeds)]
        found = run(trials)
    runs = {name: [found[t] for t in trials if t.name == name] for name in RATES}
    return [*_updates(rates, runs, quick=quick), *_times(quick=quick)]


class Trial(NamedTuple):
    name: str
    rate: float
    seed: int


Run = Callable[[Sequence[Trial]], dict[Trial, Losses]]


@contextmanager
def _simulator(updates: int) -> Iterator[Run]:
    with sandbox() as directory:
        text = (EXAMPLE / "task.py").read_text()
        for old, new in SIZES.items():
            assert old in text, old
            text = text.replace(old, new)
        (directory / "task.py").write_text(text)
        file = directory / "job.toml"
        sizes = {"steps": updates * WORKERS, "every": EVERY * WORKERS}
        file.write_text(JOB.format(workers=WORKERS, batch=BATCH, **sizes))
        os.environ.update(ONE_THREAD)
        with simulators.opened(AT_A_TIME, file) as process:
            yield lambda trials: _losses(process, directory, trials)


def _losses(process: Any, directory: Path, trials: Sequence[Trial]) -> dict[Trial, Losses]:
    """Raises DlctlError for what fails in a run."""
    places = {}
    for trial in trials:
        chosen = {"name": trial.name, "lr": trial.rate, **RATES[trial.name][0]}
        overrides = {f"optimizer.{key}": value for key, value in chosen.items()}
        start = simulate.read(directory / "job.toml", {**overrides, "job.seed": trial.seed})
        places[trial] = directory / f"{trial.name}-{trial.rate:g}-{trial.seed}"
        simulate.prepare(places[trial], start)
    requests = [
        SimulationRequest(directory=str(place), seed=trial.seed, step_s=0.02)
        for trial, place in places.items()
    ]
    found = {}
    for (trial, place), answer in zip(places.items(), process.ask(requests), strict=True):
        if (error := simulators.error_in(answer)) is not None:
            raise error
        points = history.read(place).evaluations
        found[trial] = {round(p.step / WORKERS): p.metrics["val_loss"] for p in points}
        print(f"  {trial}: {_end(found[trial]):.3f}", file=sys.stderr, flush=True)
    return found


def _end(losses: Losses) -> float:
    return [*losses.values()][-1]


def _best(found: dict[Trial, Losses]) -> dict[str, float]:
    """Optimiser -> the rate that ends lowest on average; a NaN is no loss."""
    ends: dict[tuple[str, float], list[float]] = {}
    for trial, losses in found.items():
        ends.setdefault((trial.name, trial.rate), []).append(_end(losses))
    means = {key: np.nan_to_num(mean(each), nan=np.inf) for key, each in ends.items()}
    return {
        name: min((rate for of, rate in means if of == name), key=lambda rate: means[name, rate])
        for name in RATES
    }


def _updates(
    rates: dict[str, float], runs: dict[str, list[Losses]], *, quick: bool
) -> list[Figure]:
    """The updates of each until AdamW's loss, as a multiple of AdamW's."""
    targets = [_end(losses) for losses in runs["adamw"]]
    of_adamw = [
        _first(losses, target) for losses, target in zip(runs["adamw"], targets, strict=True)
    ]
    figures = []
    for name in [name for name in runs if name != "adamw"]:
        taken = [_first(losses, t) for losses, t in zip(runs[name], targets, strict=True)]
        ratios = tuple(
            (ours if ours is not None else np.inf) / (theirs or 1)
            for ours, theirs in zip(taken, of_adamw, strict=True)
        )
        ends = median(_end(losses) for losses in runs[name])
        said = (
            f"updates {', '.join('never' if n is None else str(n) for n in taken)}; AdamW "
            f"{', '.join(map(str, of_adamw))}; ends with {ends:.3f}, AdamW with "
            f"{median(targets):.3f}; rates {rates[name]:g}, {rates['adamw']:g}"
        )
        what = f"{name} / adamw: updates to the same loss, small GPT"
        asked = None if quick else FEWER_ASKED
        figures.append(Figure(CHAPTER, what, "x", ratios, asked, said))
    return figures


def _first(losses: Losses, target: float) -> int | None:
    """The first evaluated update with at most this loss."""
    return next((update for update, loss in losses.items() if loss <= target), None)


# ---------------------------------------------------------------- time


def _times(*, quick: bool) -> list[Figure]:
    """An update of a shard that has all of the example's model, 390,544 parameters."""
    command = [sys.executable, "-m", "benchmarks.matrices", str(3 if quick else APPLIES)]
    surroundings = os.environ | ONE_THREAD
    ended = subprocess.run(command, env=surroundings, text=True, capture_output=True, check=True)
    took = json.loads(ended.stdout)
    return [_time(name, bare, took) for bare in BARE for name in TIMED if name not in BARE]


def _time(name: str, bare: str, took: dict[str, list[float]]) -> Figure:
    bare_s = median(took[bare])
    said = (
        f"median {1e3 * median(took[name]):.1f} ms, slowest {1e3 * max(took[name]):.1f} ms, "
        f"mean {1e3 * sum(took[name]) / len(took[name]):.1f} ms; {bare} {1e3 * bare_s:.2f} ms"
    )
    ratios = tuple(each / bare_s for each in took[name])
    return Figure(CHAPTER, f"{name} / {bare}: time of an update", "x", ratios, None, said)


def _layout() -> Layout:
    """That of `examples/chargpt`, without torch."""
    text = (EXAMPLE / "task.py").read_text()
    found = re.search(r"WIDTH, HEADS, LAYERS = (\d+), \d+, (\d+)", text)
    assert found is not None
    width, layers = map(int, found.groups())
    shapes: dict[str, tuple[int, ...]] = {"character": (96, width), "position": (64, width)}
    for block in range(layers):
        sides = {"qkv": (3 * width, width), "attended": (width, width),
                 "hidden": (4 * width, width), "out": (width, 4 * width)}  # fmt: skip
        for name, shape in sides.items():
            shapes |= {f"{block}.{name}": shape, f"{block}.{name}.bias": shape[:1]}
        for name in ("norm_attention", "norm_hidden"):
            shapes |= {f"{block}.{name}": (width,), f"{block}.{name}.bias": (width,)}
    shapes |= {"norm": (width,), "norm.bias": (width,)}
    return Layout(tuple(TensorEntry(n, TRAINED, shape, "float32") for n, shape in shapes.items()))


def _applied(name: str, layout: Layout, count: int) -> list[float]:
    """Seconds of each update, after the first ones."""
    optimizer = on_shard.make(
        registry.load("optimizers", name), {"lr": 1e-3}, (), layout, 0, layout.size()
    )
    kept = kept_of(optimizer)
    spec = Spec(
        "bench", 0, 0, layout.size(), optimizer.slots, workers=1,
        kept=None if kept is None else {n: cut.hi - cut.lo for n, cut in kept.items()},
    )  # fmt: skip
    shard, rng, found = Shard(optimizer, InMemory().create(spec)), np.random.default_rng(0), []
    for _ in range(2 + count):
        push = Delta(rng.standard_normal(layout.size()).astype(np.float32))
        began = time.perf_counter()
        shard.apply(push)
        found.append(time.perf_counter() - began)
    return found[2:]


if __name__ == "__main__":
    of_example = _layout()
    print(json.dumps({name: _applied(name, of_example, int(sys.argv[1])) for name in TIMED}))
