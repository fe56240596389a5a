"""A task: what to train, on what, and how well it goes. Change these four methods to your own.

Two spirals wind around each other; a small network learns which of them a point lies on.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset


def spirals(points: int, seed: int) -> TensorDataset:
    """`points` samples ((x, y), spiral): float32[2] and 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    spiral = torch.randint(0, 2, (points,), generator=generator)
    turn = torch.rand(points, generator=generator).sqrt() * 3 * math.pi
    angle = turn + math.pi * spiral
    position = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 9
    noise = 0.02 * torch.randn(points, 2, generator=generator)
    return TensorDataset(position + noise, spiral)


class TwoSpirals:
    def model(self) -> nn.Module:
        """Called once in every worker, with the same seed."""
        return nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )

    def dataset(self) -> Dataset[tuple[Tensor, ...]]:
        """Anything with a length and samples by number; dlctl deals them out to the workers."""
        return spirals(8192, seed=1)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """The mean over the batch; the gradient is taken of it."""
        position, spiral = batch
        return functional.cross_entropy(model(position), spiral)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Optional. `dlctl status` shows what it returns; `stop.target` can end the run by it."""
        position, spiral = spirals(2048, seed=2).tensors
        right = model(position).argmax(dim=1) == spiral
        return {"accuracy": right.float().mean().item()}


task = TwoSpirals()
