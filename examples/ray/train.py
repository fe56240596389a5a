"""A training loop of your own. `dlctl.attach` makes it a worker of a run; without a run, as with
`python train.py`, it trains alone.

Two spirals wind around each other; a small network learns which of them a point lies on.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dlctl


def spirals(points: int, seed: int) -> TensorDataset:
    """`points` samples ((x, y), spiral): float32[2] and 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    spiral = torch.randint(0, 2, (points,), generator=generator)
    turn = torch.rand(points, generator=generator).sqrt() * 3 * math.pi
    angle = turn + math.pi * spiral
    position = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 9
    noise = 0.02 * torch.randn(points, 2, generator=generator)
    return TensorDataset(position + noise, spiral)


def accuracy(model: nn.Module) -> dict[str, float]:
    """Optional. `dlctl status` shows what it returns; `stop.target` can end the run by it."""
    position, spiral = spirals(2048, seed=2).tensors
    right = model(position).argmax(dim=1) == spiral
    return {"accuracy": right.float().mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=3e-3)
    lr = parser.parse_args().lr
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    run = dlctl.attach(model, optimizer, evaluate=accuracy)
    with run:
        # The samples of the run are dealt out to its workers; the loop ends when the run does.
        for position, spiral in run.loader(spirals(8192, seed=1), batch_size=64):
            loss = functional.cross_entropy(model(position), spiral)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            for group in optimizer.param_groups:
                group["lr"] = lr * run.lr_factor  # of [schedule]; 1 without one


if __name__ == "__main__":
    main()
