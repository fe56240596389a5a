"""Workers whose updates arrive late at each other: the rule with which Dai et al., "Toward
Understanding the Impact of Staleness in Distributed Machine Learning", 2018, study staleness alone.

    w_p     worker p's copy of the model
    u_p     its update in round t, by its own optimiser from a gradient at w_p
    s       the longest delay

Worker p adds u_p to its own copy at once, and to that of p' after 1 + r rounds, r uniform in
0 .. s, drawn for each update and each receiver. With s = 0 all have the updates of all
others one round later.

All workers of all seeds are stacked: a weight matrix is one tensor [replicas, in, out]. The
optimisers of [inner] used here are element-wise, so one of them steps all. The updates of the last
s + 1 rounds are kept, and each receiver sums those that arrive: that reads them once, where adding
them to what every receiver has still to get would read and write it s + 1 rounds ahead. Gradients
are written out: autograd's own work is more than that of so small networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from daemons.worker.inner_optimizer import InnerOptimizer
from dlctl.job.config import Choice

Json = dict[str, Any]
OPTIMIZERS: dict[str, tuple[str, Json, float]] = {
    "sgd": ("sgd", {}, 0.01),
    "momentum": ("sgd", {"momentum": 0.9}, 0.001),
    "adagrad": ("adagrad", {}, 0.001),
    "adam": ("adam", {}, 0.0001),
    "rmsprop": ("rmsprop", {}, 0.0001),
}
"""Name -> that of [inner], its options, and a rate to begin the search with."""
WIDTH, BATCH, HELD_OUT = 32, 16, 360
TARGET = 0.9
EVERY = 3
"""Rounds between two evaluations."""
SEARCH = 12
CLOSE = 1.1
TUNING_SEED = 0
COHERENCE_OF = 512
"""Samples whose gradient is compared."""


@dataclass(frozen=True, slots=True)
class Digits:
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def of(cls, file: Path) -> Digits:
        with np.load(file) as arrays:
            images = torch.tensor(arrays["pixels"]).float() / 8
            labels = torch.tensor(arrays["labels"]).long()
        images -= images[:-HELD_OUT].mean(0)
        return cls(images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:])


@dataclass(frozen=True, slots=True)
class DelaySetting:
    optimizer: str
    hidden: int
    workers: int
    delay: int
    seeds: tuple[int, ...]


class Delayed:
    """The training of one setting, all seeds at once."""

    def __init__(self, data: Digits, setting: DelaySetting, lr: float) -> None:
        self.data = data
        self.setting = setting
        self.lr = lr
        self.rngs = [torch.Generator().manual_seed(1000 + seed) for seed in setting.seeds]
        self.replicas = len(setting.seeds) * setting.workers
        widths = [64, *[WIDTH] * setting.hidden, 10]
        self.shapes = [
            shape
            for fan_in, fan_out in pairwise(widths)
            for shape in ((fan_in, fan_out), (1, fan_out))
        ]
        self.sizes = [rows * columns for rows, columns in self.shapes]
        models = torch.stack([self._initial(seed) for seed in setting.seeds])
        self.copies = models.repeat_interleave(setting.workers, 0)  # [replicas, d]
        name, options, _ = OPTIMIZERS[setting.optimizer]
        self.tensors = self.views(self.copies)
        self.inner = InnerOptimizer(Choice(name=name, options={"lr": lr, **options}), self.tensors)
        rounds = setting.delay + 1
        self.updates = torch.zeros(rounds, *self.copies.shape)
        """Of the last rounds: [rounds, replicas, d]; that of round t at t mod rounds."""
        self.delays = torch.full((rounds, len(setting.seeds), setting.workers, setting.workers), -1)
        """r of these updates: [rounds, seeds, to, from]; -1: it goes nowhere."""
        self.others = ~torch.eye(setting.workers, dtype=torch.bool)
        self.round = 0

    def _initial(self, seed: int) -> Tensor:
        """As torch initialises linear layers: float32[d]."""
        rng = torch.Generator().manual_seed(seed)
        parts, bound = [], 0.0
        for rows, columns in self.shapes:
            bound = rows**-0.5 if rows > 1 else bound
            parts.append((2 * torch.rand(rows * columns, generator=rng) - 1) * bound)
        return torch.cat(parts)

    def views(self, copies: Tensor) -> list[Tensor]:
        parts = copies.split(self.sizes, 1)  # type: ignore[no-untyped-call]
        return [
            part.view(len(copies), *shape) for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def step(self) -> None:
        """One round of all workers."""
        before = self.copies.clone()
        rows = torch.cat(
            [
                torch.randint(len(self.data.images), (self.setting.workers, BATCH), generator=rng)
                for rng in self.rngs
            ]
        )
        gradients = self._gradients(self.copies, self.data.images[rows], self.data.labels[rows])
        self.inner.step(gradients, self.lr)
        self.exchange(self.copies - before)

    def exchange(self, updates: Tensor) -> None:
        """Send the updates of this round, float32[replicas, d], and add what arrives in it."""
        place = self.round % len(self.updates)
        self.updates[place] = updates
        self.delays[place] = self._drawn()
        self.copies += self._arriving()
        self.round += 1

    def _gradients(self, copies: Tensor, images: Tensor, labels: Tensor) -> list[Tensor]:
        """Of the mean loss of each replica: images float32[replicas, batch, 64]."""
        tensors = self.views(copies)
        inputs = [images]
        for weights, biases in zip(tensors[:-2:2], tensors[1:-2:2], strict=True):
            inputs.append(torch.baddbmm(biases, inputs[-1], weights).relu_())
        scores = torch.baddbmm(tensors[-1], inputs[-1], tensors[-2])
        along = functional.softmax(scores, 2) - functional.one_hot(labels, scores.shape[2])
        along /= labels.shape[1]
        found: list[Tensor] = []
        for number in range(len(inputs) - 1, -1, -1):
            x = inputs[number]
            found = [x.transpose(1, 2) @ along, along.sum(1, keepdim=True), *found]
            if number:
                along = (along @ tensors[2 * number].transpose(1, 2)) * (x > 0)
        return found

    def _drawn(self) -> Tensor:
        """r for each update of this round and each of its receivers: int64[seeds, to, from]."""
        workers = self.setting.workers
        r = torch.stack(
            [
                torch.randint(self.setting.delay + 1, (workers, workers), generator=rng)
                for rng in self.rngs
            ]
        )  # [seeds, from, to]
        return torch.where(self.others, r.transpose(1, 2), -1)

    def _arriving(self) -> Tensor:
        """The sum of what reaches each replica at the end of this round: float32[replicas, d]."""
        rounds, _, workers, _ = self.delays.shape
        ages = (self.round - torch.arange(rounds)) % rounds
        found = (self.delays == ages.view(-1, 1, 1, 1)).permute(1, 2, 0, 3)
        seed, to, place, sender = found.nonzero(as_tuple=True)
        counts = torch.bincount(seed * workers + to, minlength=self.replicas)
        return functional.embedding_bag(
            place * self.replicas + seed * workers + sender,
            self.updates.view(-1, self.updates.shape[2]),
            counts.cumsum(0) - counts,
            mode="sum",
        )

    def accuracy(self) -> Tensor:
        """Of the first worker of each seed, on the test scans: float32[seeds]."""
        firsts = self.copies[:: self.setting.workers]
        images = self.data.test_images.expand(len(firsts), -1, -1)
        guesses = _scores(self.views(firsts), images).argmax(2)
        return (guesses == self.data.test_labels).float().mean(1)

    def gradient(self) -> Tensor:
        """Of the first worker of each seed, over many samples: float32[seeds, d]."""
        firsts = self.copies[:: self.setting.workers]
        images = self.data.images[:COHERENCE_OF].expand(len(firsts), -1, -1)
        labels = self.data.labels[:COHERENCE_OF].expand(len(firsts), -1)
        gradients = self._gradients(firsts, images, labels)
        return torch.cat([gradient.flatten(1) for gradient in gradients], 1)


def _scores(tensors: list[Tensor], images: Tensor) -> Tensor:
    x = images
    for number in range(0, len(tensors), 2):
        x = x @ tensors[number] + tensors[number + 1]
        if number < len(tensors) - 2:
            x = torch.relu(x)
    return x


def rounds_to_target(training: Delayed, rounds_max: int) -> list[int]:
    """Of each seed; `rounds_max` where the target is not reached in as many."""
    found = [rounds_max] * len(training.setting.seeds)
    while training.round < rounds_max:
        training.step()
        if training.round % EVERY:
            continue
        for number, accuracy in enumerate(training.accuracy().tolist()):
            if accuracy >= TARGET:
                found[number] = min(found[number], training.round)
        if max(found) < rounds_max:
            break
    return found


def rate_for(data: Digits, setting: DelaySetting, rounds: int) -> float:
    """The rate with which about so many rounds reach the target without delay, by bisection."""
    setting = DelaySetting(setting.optimizer, setting.hidden, setting.workers, 0, (TUNING_SEED,))
    lr, factor, was_slow = OPTIMIZERS[setting.optimizer][2], 4.0, None
    for _ in range(SEARCH):
        (needed,) = rounds_to_target(Delayed(data, setting, lr), 2 * rounds)
        if rounds / CLOSE <= needed <= rounds * CLOSE:
            break
        is_slow = needed > rounds
        if was_slow is not None and was_slow != is_slow:
            factor **= 0.5
        lr *= factor if is_slow else 1 / factor
        was_slow = is_slow
    return lr


def coherences(training: Delayed, delay: int, rounds: int) -> list[float]:
    """Gradient coherence of each seed, its median over the rounds: the least of the products of the
    gradient and those of the last `delay` rounds, relative to its own square.
    """
    every = max(1, delay // 4)
    past: list[Tensor] = []
    found: list[Tensor] = []
    for _ in range(rounds // every):
        for _ in range(every):
            training.step()
        now = training.gradient()
        past = [*past[-3:], now]
        products = torch.stack([(now * each).sum(1) for each in past])
        found.append(products.min(0).values / (now * now).sum(1))
    return [float(value) for value in torch.stack(found).median(0).values]


def answer(request: Json) -> Json:
    """request: {"directory": with digits.npz, "optimizer", "hidden", "workers", "delays", "seeds",
    "rounds": to the target without delay, "times_max": as many times, and it is given up}, and
    {"coherence": delay} for that as well. Returns {"lr", "rounds": delay -> a number for each seed,
    "coherence"}.
    """
    data = Digits.of(Path(request["directory"]) / "digits.npz")
    seeds = tuple(request["seeds"])
    made = DelaySetting(request["optimizer"], request["hidden"], request["workers"], 0, seeds)
    lr = request.get("lr") or rate_for(data, made, request["rounds"])
    rounds_max = int(request["times_max"] * request["rounds"])
    rounds = {}
    for delay in request["delays"]:
        setting = DelaySetting(made.optimizer, made.hidden, made.workers, delay, seeds)
        rounds[str(delay)] = rounds_to_target(Delayed(data, setting, lr), rounds_max)
    found: Json = {"lr": lr, "rounds": rounds}
    if delay := request.get("coherence"):
        setting = DelaySetting(made.optimizer, made.hidden, made.workers, delay, seeds)
        found["coherence"] = coherences(Delayed(data, setting, lr), delay, request["rounds"])
    return found
