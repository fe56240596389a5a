"""The two sides of a divided model in one process: the gradient is that of the whole model, with
NoPeek's term in the client's part, and what does not fit is one clear error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from daemons.worker.replica import TorchReplica
from daemons.worker.split import dcor, leakage
from daemons.worker.split.client import ClientParts
from daemons.worker.split.head import Head, HeadParts
from daemons.worker.task.user_task import Task, TaskError
from dlctl.algorithms.engines import EnginePlace

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(3))
Y = torch.arange(12) % 3


class Clinic:
    width = 5

    def client_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, self.width), nn.Tanh())

    def top_model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def dataset(self) -> Any:
        return torch.utils.data.TensorDataset(X, Y)

    def loss(self, output: Any, y: Any) -> Any:
        return functional.cross_entropy(output, y)


class Lab:
    def __init__(self, outputs: int = 3) -> None:
        self.outputs = outputs

    def server_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, self.outputs))

    def loss(self, output: Any, y: Any) -> Any:
        return functional.cross_entropy(output, y)


class Sides:
    """A client and a head, joined by a function call."""

    def __init__(self, shape: str = "vanilla", alpha: float = 0.0, clinic: Any = None) -> None:
        options = SimpleNamespace(shape=shape, alpha=alpha)
        parts = ClientParts(clinic or Clinic(), options, "clinic")
        self.client = TorchReplica(Task(parts), device="cpu", seed=1)
        lab = Lab(3 if shape == "vanilla" else 4)
        of_head = Task(HeadParts(lab, options, "lab"), "lab", ["model"])
        self.of_head = TorchReplica(of_head, device="cpu", seed=2)
        self.head = Head(EnginePlace(self.of_head, None))
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.gradient = np.zeros(0, np.float32)
        self.z: tuple[Any, ...] = ()
        parts.ask = self._ask

    def _ask(self, op: str, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        self.asked.append((op, arrays))
        given = arrays
        if op == "forward":
            self.z = arrays
        elif op == "backward":
            given = (*self.z, *arrays)
        answer = getattr(self.head, op)(*given)
        if op in ("step", "backward"):
            *answer, self.gradient = answer
        return tuple(answer)

    def step(self, x: Any = X, y: Any = Y) -> Any:
        """Loss, gradient of the client, gradient of the head, metrics."""
        self.client.forget_gradients()
        measured = self.client.backward((x, y))
        mine = self.client.gathered(self.client.gradients())
        return measured.loss, np.array(mine), self.gradient, measured.metrics


@pytest.mark.oracle("split", "the gradient of the whole model by autograd")
@pytest.mark.parametrize("shape", ["vanilla", "u"])
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_the_gradients_of_both_sides_are_those_of_the_whole_model(shape, alpha, agree):
    sides = Sides(shape, alpha)
    loss, mine, heads, metrics = sides.step()
    model, head = sides.client.model, sides.of_head.model
    z = model.client(X)
    output = head(z)
    expected = functional.cross_entropy(model.top(output), Y)
    whole = expected + alpha * dcor.dcor(X, z)
    parameters = [*model.parameters(), *head.parameters()]
    gradients = torch.autograd.grad(whole, parameters)
    flat = np.concatenate([g.numpy().reshape(-1) for g in gradients])
    agree(np.concatenate([mine, heads]), flat, atol=1e-6)
    agree(loss, float(whole.detach()), atol=1e-6)
    agree(metrics["u_dcor2"], float(dcor.u_dcor2(X, z.detach())), atol=1e-6)


def test_what_is_asked_has_no_sample_and_with_u_no_label():
    for shape, operations in (("vanilla", ["step"]), ("u", ["forward", "backward"])):
        sides = Sides(shape)
        sides.step()
        assert [op for op, _ in sides.asked] == operations
        whole = [array for _, arrays in sides.asked for array in arrays if array.dtype == np.int64]
        assert any(np.array_equal(array, Y.numpy()) for array in whole) == (shape == "vanilla")
        sizes = {array.size for _, arrays in sides.asked for array in arrays}
        assert X.numel() not in sizes


def test_the_whole_model_predicts_by_asking_in_eval_mode():
    sides = Sides("u")
    with torch.no_grad():
        found = sides.client.model(X)
        model = sides.client.model
        expected = model.top(sides.of_head.model(model.client(X)))
    assert torch.equal(found, expected)
    assert [op for op, _ in sides.asked] == ["predict"]


def test_a_head_that_starts_between_the_halves_of_a_batch_is_asked_from_the_first_one():
    sides = Sides("u")
    plain = sides.step()
    asks = sides.client.task.user.ask
    lost = iter([True, False])
    sides.client.task.user.ask = lambda op, arrays: (
        () if op == "backward" and next(lost) else asks(op, arrays)
    )
    sides.asked.clear()
    again = sides.step()
    assert [op for op, _ in sides.asked] == ["forward", "forward", "backward"]
    assert np.array_equal(again[1], plain[1])


def test_a_cut_of_another_shape_is_one_error_that_names_both_parties():
    wide = Clinic()
    wide.width = 7
    with pytest.raises(TaskError, match=r'"lab".*float32\[7\]') as caught:
        Sides(clinic=wide).step()
    assert "start again" in (caught.value.hint or "")


def test_clients_with_different_cuts_are_told_apart():
    sides = Sides()
    sides.step()
    with pytest.raises(TaskError, match=r"float32\[5\].*float32\[2, 5\]"):
        sides.head.predict(np.zeros(10, np.float32), np.array([1, 2, 5], np.int64))


class Whole(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.long()


@pytest.mark.parametrize(
    ("part", "returns", "word"),
    [
        ("client_model", lambda: nn.Flatten(0), "a row for each"),
        ("client_model", lambda: 3, "Module"),
        ("client_model", lambda: Whole(), "int64"),
        ("loss", lambda output, y: 3.0, "no loss"),
    ],
)
def test_what_a_party_returns_is_checked(part, returns, word):
    clinic = Clinic()
    setattr(clinic, part, returns)
    with pytest.raises(TaskError, match=word):
        Sides("u", clinic=clinic).step()


def test_a_party_without_its_part_is_named():
    with pytest.raises(TaskError, match=r'"clinic" lacks client_model'):
        ClientParts(Lab(), SimpleNamespace(shape="vanilla", alpha=0.0), "clinic")
    with pytest.raises(TaskError, match=r'"lab" lacks server_model'):
        HeadParts(Clinic(), SimpleNamespace(shape="vanilla", alpha=0.0), "lab")


def test_nopeek_needs_four_samples_and_without_it_one_is_enough():
    with pytest.raises(TaskError, match="4 or more") as caught:
        Sides(alpha=0.1).step(X[:3], Y[:3])
    assert "batch_size" in (caught.value.hint or "")
    assert Sides().step(X[:1], Y[:1])[3] == {}


# ---------------------------------------------------------------- the attack


def test_an_attacker_reconstructs_what_z_tells_and_not_what_it_does_not():
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(400, 6, generator=torch.Generator().manual_seed(1))
    nothing = leakage.error_of_mean(x[:300], x[300:])
    for z, low, high in ((x * 2 + 1, 0.0, 0.1), (noise, 0.9, 2.0)):
        error = leakage.reconstruction_error(z[:300], x[:300], z[300:], x[300:], steps=400)
        assert low <= error / nothing <= high


def test_the_auc_of_a_norm_is_that_of_the_ranks():
    labels = torch.tensor([0, 0, 1, 1])
    assert leakage.auc([1.0, 2.0, 3.0, 4.0], labels == 1) == 1.0
    assert leakage.auc([1.0, 1.0, 1.0, 1.0], labels == 1) == 0.5
    assert leakage.label_auc(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), labels) == 1.0
    assert leakage.label_auc(torch.ones(4, 1), labels) == 0.5
    with pytest.raises(ValueError, match="one kind"):
        leakage.auc([1.0], torch.tensor([True]))
