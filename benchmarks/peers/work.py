"""The work: a small network and its data, the same for all peers.

The network is a stack of linear layers with ReLU between them, with initial values of a fixed seed.
Every worker draws mini-batches without replacement from its own part of the shuffled training set,
reshuffled in every epoch; dlctl leases portions of the whole set, reshuffled in every epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

MODEL_SEED = 1
PARTS_SEED = 1234
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "digits.npz"
WORKS = {"fashion": (784, 256, 128, 10), "digits": (64, 32, 10)}
"""Name -> the sizes of the layers."""


class Data(NamedTuple):
    """float32[n, pixels] and int64[n], for training and for testing."""

    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


@lru_cache
def data_of(work: str) -> Data:
    return {"fashion": _fashion, "digits": _digits}[work]()


def _fashion() -> Data:
    from examples.fashion_mnist import fashion_data

    parts = []
    for part in ("train", "t10k"):
        images, labels = fashion_data.load(part)
        pixels = torch.from_numpy(images.reshape(len(images), -1)).float()
        parts += [(pixels / 255 - 0.286) / 0.353, torch.from_numpy(labels).long()]
    return Data(*parts)


def _digits() -> Data:
    with np.load(DIGITS) as file:  # in random order; the last 360 are held out
        inputs = torch.from_numpy(file["pixels"]).float() / 8 - 1
        labels = torch.from_numpy(file["labels"]).long()
    return Data(inputs[:-360], labels[:-360], inputs[-360:], labels[-360:])


def model_of(work: str) -> nn.Sequential:
    """Sets torch's global seed."""
    torch.manual_seed(MODEL_SEED)
    sizes = WORKS[work]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs), labels)


def batches(
    work: str, worker: int, workers: int, batch_size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """An infinite stream of mini-batches of one worker's part.

    The data is loaded and the part selected when this returns, not at the first batch: call it
    before the clock starts. Each epoch is shuffled when it starts, as in dlctl.
    """
    data = data_of(work)
    generator = torch.Generator().manual_seed(PARTS_SEED)
    part = torch.randperm(len(data.inputs), generator=generator)[worker::workers]
    generator.manual_seed(1000 * seed + worker)
    return _shuffled(data.inputs[part], data.labels[part], batch_size, generator)


def _shuffled(
    inputs: Tensor, labels: Tensor, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        order = torch.randperm(len(inputs), generator=generator)
        for i in range(0, len(inputs) - batch_size + 1, batch_size):
            chosen = order[i : i + batch_size]
            # Twice as fast as indexing with `chosen`.
            yield inputs.index_select(0, chosen), labels.index_select(0, chosen)


def vector_of(model: nn.Module) -> Tensor:
    """float32[d]: a copy of all parameters, concatenated."""
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])


class Flat:
    """A model whose parameters and gradients are views of `w` and `g`, float32[d] each."""

    def __init__(self, work: str) -> None:
        self.model = model_of(work)
        self.w = vector_of(self.model)
        self.g = torch.zeros_like(self.w)
        begin = 0
        for parameter in self.model.parameters():
            end = begin + parameter.numel()
            parameter.data = self.w[begin:end].view_as(parameter)
            parameter.grad = self.g[begin:end].view_as(parameter)
            begin = end

    def compute_gradient(self, inputs: Tensor, labels: Tensor) -> None:
        """Into `g`."""
        self.g.zero_()
        loss_of(self.model, inputs, labels).backward()  # type: ignore[no-untyped-call]


@lru_cache
def _evaluated(work: str) -> Flat:
    return Flat(work)


def accuracy(work: str, parameters: Tensor) -> float:
    """Of `parameters`, float32[d], on the test set."""
    flat, data = _evaluated(work), data_of(work)
    flat.w.copy_(parameters)
    with torch.no_grad():
        guesses = flat.model(data.test_inputs).argmax(1)
    return float((guesses == data.test_labels).float().mean())
