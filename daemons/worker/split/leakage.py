"""What an attacker learns from what a client sends: an evaluation, not a part of the training.

The attacker has pairs (x, z) of some samples, as a client that works together with the head does,
and trains a decoder from z to x. It is tested on z of samples that neither it nor the model has
seen. With "vanilla" the head also has dL/dz: its norm alone may tell a label.

An attack that fails shows that this attack fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, STEPS, BATCH, LR = 256, 1000, 64, 1e-3


def reconstruction_error(
    z: Tensor, x: Tensor, z_tested: Tensor, x_tested: Tensor, *, steps: int = STEPS, seed: int = 0
) -> float:
    """The mean squared error of a decoder that was trained on (z, x), on other samples."""
    generator = torch.Generator().manual_seed(seed)
    flat, wanted = z.flatten(1), x.flatten(1)
    # A unit that is hardly ever on has no scale of its own: it would be all that is seen.
    mean, spread = flat.mean(0), flat.std(0).clamp(min=float(flat.std()) / 10 + 1e-12)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        decoder = nn.Sequential(
            nn.Linear(flat.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, wanted.shape[1])
        )
    optimizer = torch.optim.Adam(decoder.parameters(), lr=LR)
    for _ in range(steps):
        rows = torch.randint(len(flat), (min(BATCH, len(flat)),), generator=generator)
        loss = functional.mse_loss(decoder((flat[rows] - mean) / spread), wanted[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        found = decoder((z_tested.flatten(1) - mean) / spread)
        return float(functional.mse_loss(found, x_tested.flatten(1)))


def error_of_mean(x: Tensor, x_tested: Tensor) -> float:
    """The control: an attacker without z, who answers the mean of x."""
    return float(((x_tested - x.mean(0)) ** 2).mean())


def auc(scores: Sequence[float] | Tensor, are_true: Tensor) -> float:
    """The area under the ROC curve: the probability that a true one has the higher score, ties
    counting half. Raises ValueError unless there are some of both.
    """
    values = torch.as_tensor(scores, dtype=torch.float64)
    above, below = values[are_true], values[~are_true]
    if not len(above) or not len(below):
        raise ValueError("the samples are all of one kind")
    higher = (above[:, None] > below[None, :]).double().mean()
    ties = (above[:, None] == below[None, :]).double().mean()
    return float(higher + ties / 2)


def label_auc(gradients: Tensor, labels: Tensor) -> float:
    """How well |dL/dz| of a sample tells whether it has a label: 0.5 not at all, 1 always. The mean
    over all labels, each against the others, whichever way round.
    """
    norms = gradients.flatten(1).norm(dim=1)
    of_each = [auc(norms, labels == label) for label in set(labels.tolist())]
    return sum(0.5 + abs(found - 0.5) for found in of_each) / len(of_each)
