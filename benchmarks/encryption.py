"""The cost of CURVE: raw pushes and fetches, and the speed of training over a link of 1 Gbit/s.

Raw, on an unlimited loopback, the cipher is most of the work; the final state of both servers is
checked (replay.py). The second figure is the relevant one: a model of a million parameters, all of
them pushed at every step and fetched continuously, so that a loopback of 1 Gbit/s (both directions
together) is saturated.
"""

from __future__ import annotations

import json
import time

from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.link import link
from benchmarks.replay import Gradients
from benchmarks.sandbox import Dlctl, sandbox, write_job
from benchmarks.shard import Worker, shard
from dlctl.compress.none import Dense, DenseOptions
from tests.hosts.cluster import missing

CHAPTER = "encryption"
REPEATS = {10_000: 200, 1_000_000: 20}
TRAINING_S = 8.0
TRAINING = "a step of training that fills 1 Gbit/s, 1,000,000 parameters, CURVE / plain"
TRAINING_ASKED = 1.05
TASK = '''"""A million parameters, and next to nothing to compute."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Wide:
    def model(self):
        return nn.Linear(1000, 1000)

    def dataset(self):
        inputs = torch.randn(4096, 1000, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


task = Wide()
'''


def measure(*, quick: bool) -> list[Figure]:
    sizes = [*REPEATS][:1] if quick else [*REPEATS]
    figures = [_raw(size, 2 if quick else 7, REPEATS[size]) for size in sizes]
    if why := missing():
        return [*figures, Figure(CHAPTER, TRAINING, "x", (), TRAINING_ASKED, skipped=why)]
    return figures if quick else [*figures, _training(rounds=5)]


def _raw(size: int, rounds: int, repeats: int) -> Figure:
    what = f"push + fetch, {size:,} parameters, CURVE / plain"
    curves, plains = (Gradients(f"{CHAPTER}: {what}", "adagrad", size) for _ in range(2))
    with (
        sandbox() as here,
        sandbox() as there,
        shard(here, "curve", size, "adagrad") as curve,
        shard(there, "tcp", size, "adagrad") as plain,
    ):
        times = take_turns(
            rounds, lambda: _bounce(curve, curves), lambda: _bounce(plain, plains), repeats,
            curves.fill, plains.fill,
        )  # fmt: skip
        curves.compare(curve.fetch(), curve.version)
        plains.compare(plain.fetch(), plain.version)
    return ratio(CHAPTER, what, *times)


def _bounce(worker: Worker, gradients: Gradients) -> None:
    worker.push(Dense(DenseOptions()).take(gradients.gradient))
    worker.fetch()


def _training(rounds: int) -> Figure:
    """Seconds per step, CURVE against plain."""
    step_s: dict[str, list[float]] = {"curve": [], "none": []}
    with sandbox() as directory, link(1) as lab:
        dlctl = Dlctl(lab.enter, lab.env)
        for _ in range(rounds):
            for encryption, found in step_s.items():
                network = f'[network]\ntransport = "tcp"\nencryption = "{encryption}"\n'
                file = write_job(directory, servers=1, workers=1, more=network, task=TASK)
                with dlctl.running(file):
                    found.append(_step_s(dlctl))
    return ratio(CHAPTER, TRAINING, step_s["curve"], step_s["none"], TRAINING_ASKED)


def _step_s(dlctl: Dlctl) -> float:
    begun, first = time.perf_counter(), _step(dlctl)
    while time.perf_counter() - begun < TRAINING_S:
        time.sleep(0.1)
    return (time.perf_counter() - begun) / (_step(dlctl) - first)


def _step(dlctl: Dlctl) -> int:
    return int(json.loads(dlctl("status", "--json"))["step"])
