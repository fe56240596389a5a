"""Split learning with NoPeek in one process: the loss of `split`, and what the cut tells.

x       scans                   z = f(x)    what the client sends, at the cut
alpha   weight of the distance correlation of x and z, beside the cross-entropy
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from daemons.simulator.delays import Digits
from daemons.worker.split import dcor, leakage

Json = dict[str, Any]
BATCH, LR, MOMENTUM = 64, 0.05, 0.9
ATTACKED = 180
"""Held-out scans whose pairs (x, z) the attacker has; the other ones are guessed."""


def answer(request: Json) -> Json:
    """request: {"directory": with digits.npz, "alphas", "seeds", "epochs"}. Returns "alpha" -> a
    list of {"accuracy", "u_dcor2", "error": the attacker's, relative to one that knows nothing}.
    """
    data = Digits.of(Path(request["directory"]) / "digits.npz")
    return {
        str(alpha): [_run(data, alpha, seed, request["epochs"]) for seed in request["seeds"]]
        for alpha in request["alphas"]
    }


def _run(data: Digits, alpha: float, seed: int, epochs: int) -> Json:
    torch.manual_seed(seed)
    client = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU())
    head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    parameters = [*client.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, LR, momentum=MOMENTUM)
    for _ in range(epochs):
        order = torch.randperm(len(data.images))
        for at in range(0, len(order) - BATCH + 1, BATCH):
            rows = order[at : at + BATCH]
            x = data.images[rows]
            z = client(x)
            loss = functional.cross_entropy(head(z), data.labels[rows])
            if alpha:
                loss = loss + alpha * dcor.dcor(x, z)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    x = data.test_images
    with torch.no_grad():
        z = client(x)
        accuracy = (head(z).argmax(1) == data.test_labels).float().mean()
    near, far = slice(None, ATTACKED), slice(ATTACKED, None)
    error = leakage.reconstruction_error(z[near], x[near], z[far], x[far], seed=seed)
    blind = leakage.error_of_mean(x[near], x[far])
    return {
        "accuracy": float(accuracy),
        "u_dcor2": float(dcor.u_dcor2(x, z)),
        "error": error / blind,
    }
