"""A LightningModule as a worker of a run; without one, as with `python train.py`, it trains alone.

Two spirals wind around each other; a small network learns which of them a point lies on.
"""

import argparse
import math

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dlctl.integrations.lightning import DlctlStrategy


def spirals(points: int, seed: int) -> TensorDataset:
    """`points` samples ((x, y), spiral): float32[2] and 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    spiral = torch.randint(0, 2, (points,), generator=generator)
    turn = torch.rand(points, generator=generator).sqrt() * 3 * math.pi
    angle = turn + math.pi * spiral
    position = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 9
    noise = 0.02 * torch.randn(points, 2, generator=generator)
    return TensorDataset(position + noise, spiral)


class Spirals(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        position, spiral = batch
        return functional.cross_entropy(self.net(position), spiral)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        position, spiral = batch
        right = self.net(position).argmax(dim=1) == spiral
        self.log("accuracy", right.float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="spirals.ckpt")
    output = parser.parse_args().output
    pl.seed_everything(0)
    trainer = pl.Trainer(
        strategy=DlctlStrategy(),
        max_epochs=20,
        logger=False,
        enable_checkpointing=False,
    )
    module = Spirals()
    train = DataLoader(spirals(8192, seed=1), batch_size=64, shuffle=True)
    trainer.fit(module, train, DataLoader(spirals(2048, seed=2), batch_size=512))
    trainer.save_checkpoint(output)  # By worker 0.


if __name__ == "__main__":
    main()
