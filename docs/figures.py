"""Draws the figure of each method, and of each optimiser of matrices, from simulated runs:
`make figures`, or `python docs/figures.py [NAME...]`.

The runs are those of `dlctl.sim`: the real roles and methods in virtual time, bit-identical for a
seed. The figures show how a method behaves; its rates are not tuned.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from dlctl import registry
from dlctl.algorithms.base import Method
from dlctl.job import config
from dlctl.jobfile import effective_options
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.optim.matrices import MatrixOptimizer
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation

FOLDER = Path(__file__).parent / "methods"
OF_OPTIMIZERS = Path(__file__).parent / "optimizers"
LEAKAGE = Path(__file__).parents[1] / "benchmarks" / "results" / "nopeek.json"
KEYS = {
    "u_dcor2": "u-dCor² of scans and cut", "error": "error of an attacker", "accuracy": "accuracy",
}  # fmt: skip
UNTIL_S, EVERY_S = 20.0, 0.4
PROBLEM = {"samples": 2048, "size": 256}
COMPUTE = ComputeOptions(step_s=0.05, spread=0.2, slow={3: 3.0})
NETWORK = NetworkOptions(link=SimLink(latency_s=0.01, bytes_per_s=100e3))
OPTIONS: dict[str, Any] = {
    "local_steps": 12, "exchange_every_steps": 4, "buffer_pushes": 3, "quorum": 2,
    "warmup_density": [], "clock_steps": 2, "fraction": 0.5,
}  # fmt: skip
"""For every method with such a key: the defaults are for runs a hundred times as long."""
ONLY: dict[str, dict[str, Any]] = {
    "epoch-cut": {"fraction": 0.75}, "loscar": {"density": 0.25}, "sparseloco": {"mean": "senders"},
    "target-batch": {"target_samples": 256},
    "kfac": {"factor_steps": 2, "eigen_steps": 10, "damping": 10.0, "kl_clip": 0.0},
}  # fmt: skip
RATES: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("lion", {"lr": 0.03, "beta1": 0.0, "beta2": 0.0}),
    "ringmaster-lmo": ("lmo", {"lr": 0.015}),
    "isoloco": ("isotropic", {"lr": 0.7, "momentum": 0.5}),
    "async-diloco": ("delayed-nesterov", {"lr": 0.7, "momentum": 0.5, "every": 4}),
}
MATRICES = {"adamw": 0.1, "muon": 0.15, "soap": 0.1, "shampoo": 0.1, "lmo": 0.15, "isotropic": 0.02}
"""Optimisers that `sync` is drawn with, and their rates; the first one is in grey."""
COMPRESSION: dict[str, dict[str, Any]] = {
    "topk-sampled": {"density": 0.05, "dense_below": 0},
    "topk-chunked": {"chunk": 64, "keep": 4, "dense_below": 0},
    "dct": {"side": 8, "keep": 8, "dense_below": 0},
}
LR, LOCAL_LR = 0.03, {"kfac": 5.0}
OTHER_LOCAL_LR = 0.03
SIDE = 16
"""Of the square that the parameters are, for optimisers of matrices: each server has half of it."""


class Curve(NamedTuple):
    seconds: list[float]
    megabytes: list[float]
    losses: list[float]


def job_of(name: str) -> config.JobFile:
    """A short run of a method with four workers, and two servers if it has any."""
    method: Method = registry.load("algorithms", name)
    keys = {field.name for field in dataclasses.fields(method.Options)}
    options = {key: value for key, value in OPTIONS.items() if key in keys} | ONLY.get(name, {})
    servers = 2 if method.shape.needs_servers else 0
    optimizer, rates = RATES.get(name) or (method.optimizer.name, method.optimizer.options)
    if method.pushes_gradients(method.Options(**options)) and name not in RATES:
        optimizer, rates = "sgd", {"lr": LR}
    pushes = method.compression
    squeezed = config.Choice(
        name=pushes.name, options=pushes.options | COMPRESSION.get(pushes.name, {})
    )
    inner = config.Choice(name="none")
    if method.inner.name != "none":
        inner = config.Choice(name="sgd", options={"lr": LOCAL_LR.get(name, OTHER_LOCAL_LR)})
    return config.JobFile(
        job=config.Job(name=name, task="none", stop=config.Stop(epochs=1000.0)),
        algorithm=config.Choice(name=name, options=options),
        optimizer=config.Choice(name=optimizer, options=dict(rates)),
        inner=config.Choice(name=inner.name, options=effective_options("inner_optimizers", inner)),
        compression=squeezed,
        servers=config.Servers(count=servers),
        workers=config.Workers(count=4, batch_size=16),
        data=config.Data(portion_batches=2, clients=32 if name == "fedavg" else 0),
        checkpoints=config.Checkpoints(every_s=0.0),
    )


def curve_of(name: str, optimizer: str = "") -> Curve:
    """Loss of the run's model, and total bytes sent, every `EVERY_S` simulated seconds.
    optimizer: one of `MATRICES`, in place of the method's own; on the same matrices for each.
    """
    problem, job = LeastSquares(**PROBLEM), job_of(name)
    if optimizer:
        choice = config.Choice(name=optimizer, options={"lr": MATRICES[optimizer]})
        job = dataclasses.replace(job, optimizer=choice)
    if optimizer or issubclass(registry.load("optimizers", job.optimizer.name), MatrixOptimizer):
        halves = (TensorEntry(half, TRAINED, (SIDE, SIDE // 2), "float32") for half in "ab")
        problem.layout = Layout(tuple(halves))
    simulation = Simulation(job, problem, network=NETWORK, compute=COMPUTE)
    model = registry.load("algorithms", name).shape.model
    curve = Curve([], [], [])

    def look() -> None:
        world = simulation.world
        if model == "tables":
            weights = world.weights()
        else:
            machines = [world.machine(f"worker-{slot}") for slot in range(4)]
            training = [getattr(machine, "training", None) for machine in machines]
            replicas = [t.side.parameters for t in training if t is not None and t.has_model()]
            weights = np.mean(replicas, axis=0) if replicas else np.full(PROBLEM["size"], np.nan)
        if np.isfinite(weights).all():
            curve.seconds.append(world.timeline.now)
            curve.megabytes.append(sum(world.network.nbytes.values()) / 1e6)
            curve.losses.append(problem.evaluate(weights)["loss"])

    for at_s in np.arange(EVERY_S, UNTIL_S, EVERY_S):
        simulation.at(float(at_s), look)
    simulation.run(UNTIL_S)
    return curve


def draw(name: str, curve: Curve, beside: Curve, grey: str = "sync", folder: Path = FOLDER) -> None:
    """NAME.svg: the method, or optimiser, in colour, the other one in grey."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for each, color, label, width in ((beside, "0.65", grey, 1.2), (curve, "C0", name, 1.8)):
        left.plot(each.seconds, each.losses, color=color, label=label, linewidth=width)
        if folder != FOLDER or sends_messages(label):
            right.plot(each.megabytes, each.losses, color=color, linewidth=width)
    left.set(yscale="log", xlabel="simulated seconds", ylabel="loss")
    right.set(xlabel="MB sent in total")
    left.legend(frameon=False)
    left.yaxis.set_minor_locator(NullLocator())
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    save(name, figure, folder)


def save(name: str, figure: Figure, folder: Path = FOLDER) -> None:
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    short = re.sub(r"(\d\.\d)\d+", r"\1", drawn.getvalue()).replace("\nL ", " L ")
    (folder / f"{name}.svg").write_text(short, encoding="utf-8")


def draw_leakage(name: str) -> None:
    """docs/methods/NAME.svg of a method with parties, which the simulator has not: what the cut
    tells, and what that costs, by the weight of the distance correlation (`benchmarks/nopeek.py`).
    """
    rows: dict[str, list[dict[str, float]]] = json.loads(LEAKAGE.read_text())
    means = {key: [float(np.mean([r[key] for r in of])) for of in rows.values()] for key in KEYS}
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    for axes, key in zip(figure.subplots(1, 3), KEYS, strict=True):
        axes.plot([*rows], means[key], color="C0", marker="o", linewidth=1.8)
        for at, of in rows.items():
            axes.plot([at] * len(of), [r[key] for r in of], ".", color="0.65", markersize=4)
        axes.set(xlabel="alpha", title=KEYS[key])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    save(name, figure)


def sends_messages(name: str) -> bool:
    """Whether the simulated network sees its traffic: not shared memory or sums of a group."""
    shape = registry.load("algorithms", name).shape
    return bool(shape.needs_servers or "peers" in shape.links)


def set_style() -> None:
    style = {"svg.fonttype": "none", "svg.hashsalt": "dlctl", "font.sans-serif": ["DejaVu Sans"]}
    matplotlib.rcParams.update(style | {"font.size": 9})


def draw_optimizers(names: list[str]) -> None:
    """docs/optimizers/NAME.svg: `sync` with this optimiser and, in grey, with AdamW."""
    grey, *others = MATRICES
    beside = curve_of("sync", grey) if {*names} & {*others} else None
    for name in names:
        if beside is not None and name in others:
            curve = curve_of("sync", name)
            print(f"{name}: {curve.losses[0]:.3g} -> {curve.losses[-1]:.3g}")
            draw(name, curve, beside, grey, OF_OPTIMIZERS)


def main(names: list[str]) -> None:
    set_style()
    draw_optimizers(names or [*MATRICES])
    beside = curve_of("sync")
    methods = registry.BUILT_IN["algorithms"]
    for name in [name for name in names if name in methods] if names else methods:
        if registry.load("algorithms", name).shape.is_divided:
            draw_leakage(name)
            continue
        curve = curve_of(name)
        print(
            f"{name}: {curve.losses[0]:.3g} -> {curve.losses[-1]:.3g}, {curve.megabytes[-1]:.2f} MB"
        )
        draw(name, curve, beside)


if __name__ == "__main__":
    main(sys.argv[1:])
