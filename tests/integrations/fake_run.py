"""A run of a test: what a framework does with it is written down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

RATE = 0.1


class FakeRun:
    """Has the data of a dataset in order, once. stock: the batches of each portion; at the end of
    one there is no more for now. evaluates_at: the steps at whose end the run evaluates.
    """

    def __init__(self, *stock: int, evaluates_at: tuple[int, ...] = (), **public: Any) -> None:
        self.ends = [sum(stock[: n + 1]) for n in range(len(stock))]
        self.evaluates_at = evaluates_at
        self.evaluate: Callable[[Any], dict[str, float]] | None = None
        self.is_alone = self.takes_gradients = False
        self.has_own_steps = True
        self.worker, self.workers, self.lr_factor = 0, 1, 1.0
        self.wants_stop = False
        self.tells_end = True
        """False: the run ends while the loop waits for data, not in its last step."""
        self.steps: list[int] = []
        """Batches of each."""
        self.losses: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self.reports: list[dict[str, float]] = []
        self.left: list[str] = []
        self.delivered = self.begun = 0
        vars(self).update(public)

    def __enter__(self) -> FakeRun:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.left.append("" if kind is None else kind.__name__)

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> Iterator[Any]:
        collate = options["collate_fn"] or default_collate
        while self.delivered < self.ends[-1]:
            first = self.delivered * batch_size
            self.delivered += 1
            self.begun += 1
            yield collate([dataset[first + row] for row in range(batch_size)])

    def micro(self, of: int = 1) -> bool:
        return self.begun >= of or self.delivered in self.ends

    def optimizer(self, model: torch.nn.Module, *own: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=RATE)

    def step(self, loss: Any = None, *, skipped: bool = False) -> None:
        self.steps.append(self.begun)
        self.losses.append(float(loss))
        self.begun = 0
        if len(self.steps) in self.evaluates_at:
            assert self.evaluate is not None
            self.evaluations.append(self.evaluate(None))
        self.wants_stop = self.tells_end and self.delivered == self.ends[-1]

    def report(self, **metrics: float) -> None:
        self.reports.append(metrics)


class Attached:
    """`dlctl.attach`."""

    def __init__(self) -> None:
        self.run = FakeRun(1)

    def __call__(self, model: Any, optimizer: Any, evaluate: Any = None, **_: Any) -> FakeRun:
        self.run.evaluate = evaluate
        return self.run


def trained(model: torch.nn.Linear, dataset: Any, batch_size: int, steps: list[int]) -> list[float]:
    """Train by SGD, with so many batches in each step; returns the losses."""
    losses, at = [], 0
    for count in steps:
        found = 0.0
        model.zero_grad()
        for _ in range(count):
            rows = [dataset[at + row] for row in range(batch_size)]
            at += batch_size
            x, labels = (torch.stack([row[key] for row in rows]) for key in ("x", "labels"))
            loss = torch.nn.functional.mse_loss(model(x), labels) / count
            loss.backward()
            found += float(loss)
        losses.append(found)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return losses


class Points(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 3, generator=generator)
        self.y = torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[row], "labels": self.y[row]}


def line() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


@contextlib.contextmanager
def equal_after(model: torch.nn.Module, expected: torch.nn.Module) -> Iterator[None]:
    """Within it both are trained."""
    yield
    for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), its.detach())
