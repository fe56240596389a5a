"""A small zoo of models with everything in them that real ones have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from daemons.worker.task.user_task import Task


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are tiny, and sums come out the same whatever the machine. Before each test: what
    another test sets in a thread of its own holds for all new threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class ZooTask:
    """A model, a batch for it, and a loss that looks at every output."""

    def __init__(self, build: Callable[[], nn.Module], batch: Callable[[], Any]) -> None:
        self._build = build
        self.batch = batch

    def model(self) -> nn.Module:
        return self._build()

    def dataset(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
        return (
            output.float() ** 2 * torch.linspace(0.5, 1.5, output.numel()).view_as(output)
        ).mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": float(self.loss(model, self.batch()))}


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def _tokens(rows: int, columns: int, below: int) -> Tensor:
    return torch.randint(below, (rows, columns), generator=torch.Generator().manual_seed(8))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _conv_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)
    )


class Tied(nn.Module):
    """The output layer is the embedding; one block is used twice and has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.block = nn.Linear(4, 4)
        self.again = self.block
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.again(torch.tanh(self.block(self.embedding(tokens)))))


def _frozen() -> nn.Module:
    model = _mlp()
    model[0].requires_grad_(False)
    return model


def _bfloat16() -> nn.Module:
    return _mlp().to(torch.bfloat16)


class Mixed(nn.Module):
    """float16 and float64 layers beside a float32 one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5, dtype=torch.float16)
        self.second = nn.Linear(5, 4, dtype=torch.float64)
        self.third = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x.half()).double()).float())


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4, sparse=True)
        self.out = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embedding(tokens))


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))


class UnusedAndScalar(nn.Module):
    """A branch that no batch here takes, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(6, 3)
        self.used = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.scale


class Transformer(nn.Module):
    """One causal block with an integer, a boolean and a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 13)
        self.register_buffer("mask", torch.triu(torch.ones(5, 5, dtype=torch.bool), 1))
        self.register_buffer("positions", torch.arange(5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + functional.one_hot(self.positions, 8).float()
        return self.head(self.layers(x, mask=self.mask))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        return self.out(self.lstm(x)[0])


ZOO: dict[str, ZooTask] = {
    "mlp": ZooTask(_mlp, lambda: _normal(5, 6)),
    "conv_batchnorm": ZooTask(_conv_batchnorm, lambda: _normal(4, 1, 6, 6)),
    "tied": ZooTask(Tied, lambda: _tokens(3, 4, 11)),
    "frozen": ZooTask(_frozen, lambda: _normal(5, 6)),
    "bfloat16": ZooTask(_bfloat16, lambda: _normal(5, 6, dtype=torch.bfloat16)),
    "mixed": ZooTask(Mixed, lambda: _normal(5, 6)),
    "sparse_embedding": ZooTask(SparseEmbedding, lambda: _tokens(6, 5, 20)),
    "dropout": ZooTask(_dropout, lambda: _normal(5, 6)),
    "unused_and_scalar": ZooTask(UnusedAndScalar, lambda: _normal(5, 6)),
    "transformer": ZooTask(Transformer, lambda: _tokens(2, 5, 13)),
    "recurrent": ZooTask(Recurrent, lambda: _normal(2, 4, 3)),
}


@pytest.fixture(params=sorted(ZOO))
def animal(request: pytest.FixtureRequest) -> ZooTask:
    """Each model of the zoo in turn."""
    return ZOO[request.param]


@pytest.fixture
def zoo() -> dict[str, ZooTask]:
    return ZOO


@pytest.fixture
def task_of() -> Callable[..., Task]:
    """Makes a guarded task of a few functions: task_of(model=..., loss=...)."""

    def make(**parts: Callable[..., Any]) -> Task:
        whole = {"model": _mlp, "dataset": lambda: [0], "loss": ZOO["mlp"].loss, **parts}
        return Task(type("UserTask", (), {name: staticmethod(f) for name, f in whole.items()})())

    return make
