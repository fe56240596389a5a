"""SOAP and Shampoo next to those of another package, pytorch_optimizer. `make oracles` has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import torch
from matrix_shards import layout, placed, push, shard_of

theirs = oracles.package("pytorch_optimizer")
SHAPES = {"tall": (9, 4), "wide": (3, 8), "square": (5, 5)}
SQUARE = {"a": (5, 5), "b": (4, 4), "c": (7, 7)}
"""A gradient of another shape has not full rank on its longer side."""
UPDATES = 35


def tensors(shapes: dict[str, tuple[int, ...]]) -> list[torch.Tensor]:
    return [torch.zeros(shape, requires_grad=True) for shape in shapes.values()]


def step(optimizer: Any, of: list[torch.Tensor], gradient: np.ndarray) -> None:
    sizes = [tensor.numel() for tensor in of]
    for tensor, part in zip(of, torch.from_numpy(gradient.copy()).split(sizes), strict=True):
        tensor.grad = part.view(tensor.shape).clone()
    optimizer.step()


def flat(of: list[torch.Tensor]) -> np.ndarray:
    return torch.cat([tensor.detach().ravel() for tensor in of]).numpy()


@pytest.mark.oracle("sync", "pytorch_optimizer.SOAP")
def test_soap_is_that_of_pytorch_optimizer(agree: Any) -> None:
    """On gradients of full rank: of a direction that none has had, the eigenbasis is arbitrary."""
    of = layout(SQUARE)
    size, ours = of.size(), tensors(SQUARE)
    shard = shard_of(placed("soap", of, lr=0.01, weight_decay=0.0), size)
    soap = theirs.SOAP(ours, lr=0.01, weight_decay=0.0, precondition_1d=False)
    for number in range(UPDATES):
        shard.apply(push(number, size), samples=1)
        step(soap, ours, push(number, size).values)
    agree(shard.w, flat(ours), atol=1e-5)


@pytest.mark.oracle("sync", "the directions of pytorch_optimizer.Shampoo")
def test_shampoo_steps_in_the_directions_of_pytorch_optimizer(agree: Any) -> None:
    """Its sums are our means, if these forget nothing; the length of our step is Adam's."""
    of = layout(SHAPES)
    size, ours, still = of.size(), tensors(SHAPES), {"weight_decay": 0.0}
    how = {"lr": 0.01, "beta1": 0.0, "shampoo_beta": 0.999999, "frequency": 1}
    shard = shard_of(placed("shampoo", of, **how, **still, epsilon=1e-12), size)
    shampoo = theirs.Shampoo(ours, lr=0.01, matrix_eps=1e-12, **still)
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])[:-1]
    for number in range(UPDATES):
        before = shard.w.copy(), flat(ours)
        shard.apply(push(number, size), samples=1)
        step(shampoo, ours, push(number, size).values)
        for a, b in zip(
            np.split(shard.w - before[0], ends), np.split(flat(ours) - before[1], ends), strict=True
        ):
            agree(a / np.linalg.norm(a), b / np.linalg.norm(b), atol=1e-3)
