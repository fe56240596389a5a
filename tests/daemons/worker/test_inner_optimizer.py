"""An inner optimiser and the layout of the gradients are checked together, and what it raises is
an error of the job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from stepping import SEED, choice, stepper_of
from torch import Tensor, nn

from daemons.worker.stepper import Stepper
from daemons.worker.task.failures import failure_of
from daemons.worker.task.user_task import Task, TaskError
from dlctl import registry
from dlctl.job.config import Choice, ParameterGroup

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by torch's Adagrad
NAMES = [
    name
    for name in registry.BUILT_IN["inner_optimizers"]
    if registry.load("inner_optimizers", name).torch
]
CHOICES = [
    choice(name, **options)
    for name in NAMES
    for options in ({}, {"weight_decay": 0.1}, {"momentum": 0.9})
    if options.keys()
    <= {each.name for each in dataclasses.fields(registry.load("inner_optimizers", name).Options)}
]
BATCH = torch.tensor([[1, 4, 4], [2, 1, 0]])


class Words:
    """One parameter with sparse gradients, and, unless it is alone, dense ones."""

    def __init__(self, is_alone: bool = False) -> None:
        self.is_alone = is_alone

    def model(self) -> nn.Module:
        bag = nn.EmbeddingBag(7, 3, sparse=True)
        return nn.Sequential(bag) if self.is_alone else nn.Sequential(bag, nn.Linear(3, 1))

    def dataset(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum()


def by_torch(chosen: Choice, task: Words, steps: int) -> Any:
    """What torch's own optimiser makes of the model: its values, or the error."""
    torch.manual_seed(SEED)
    model = task.model().train()
    kind = getattr(torch.optim, registry.load("inner_optimizers", chosen.name).torch)
    options = {key: value for key, value in chosen.options.items() if key != "adamw"}
    parameters = [p for p in model.parameters() if chosen.name != "muon" or p.ndim == 2]
    optimizer = kind(parameters, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(model, BATCH).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return error
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def step(stepper: Stepper) -> None:
    lr = stepper.inner._choice.options["lr"]
    stepper.step([(BATCH, 1.0)], own_lr=lr, gather=False)


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("chosen", CHOICES, ids=lambda chosen: chosen.name)
def test_sparse_gradients_are_stepped_as_by_torch_or_refused_before_it_would(
    chosen: Choice, *, is_alone: bool
) -> None:
    name, task = chosen.name, Words(is_alone)
    expected = by_torch(chosen, task, 3)
    stepper = stepper_of(task, chosen)
    before = stepper.replica.parameters.copy()
    if not isinstance(expected, Exception):
        for _ in range(3):
            step(stepper)
        np.testing.assert_allclose(stepper.replica.parameters, expected, rtol=1e-6)
        return
    with pytest.raises(TaskError) as caught:
        step(stepper)
    error = caught.value
    assert error.message.startswith(f"{name} ")
    wrong = ("1.weight", "dense") if name == "sparseadam" else ("0.weight", "sparse")
    assert f'"{wrong[0]}" is {wrong[1]}' in error.message
    assert error.where.startswith("[inner] ")
    assert error.hint
    assert not failure_of(error).error.startswith("a bug")
    assert np.array_equal(stepper.replica.parameters, before), "no part of the step was made"


def test_what_is_refused_is_the_option() -> None:
    for options in ({"weight_decay": 0.1}, {"nesterov": True, "momentum": 0.9}):
        stepper = stepper_of(Words(), choice("sgd", **options))
        with pytest.raises(TaskError, match=str(next(iter(options)))):
            step(stepper)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_a_group_without_decay_takes_sparse_gradients(name: str) -> None:
    """And one with it does not."""
    decayed = choice(name, weight_decay=0.1)
    step(stepper_of(Words(), decayed, (ParameterGroup(match=("0.*",), weight_decay=0.0),)))
    stepper = stepper_of(Words(), choice(name), (ParameterGroup(match=("0.*",), weight_decay=0.1),))
    with pytest.raises(TaskError, match=f"{name}.*weight_decay"):
        step(stepper)


def test_a_gradient_that_is_sparse_later_is_refused_then(task_of: Callable[..., Task]) -> None:
    calls = []

    def loss(model: Any, batch: Tensor) -> Tensor:
        calls.append(1)
        words = nn.functional.embedding(batch, model[0].weight, sparse=len(calls) > 1)
        return model[1](words).square().sum()

    task = task_of(model=Words().model, loss=loss)
    stepper = stepper_of(task, choice("adamw"))
    step(stepper)
    with pytest.raises(TaskError, match=r'adamw.*"0\.weig'):
        step(stepper)


def test_a_sparse_momentum_is_saved_and_goes_on() -> None:
    first, second = (stepper_of(Words(), choice("sgd", momentum=0.9)) for _ in range(2))
    for _ in range(2):
        step(first)
    second.replica.parameters[:] = first.replica.parameters
    second.restore(first.state())
    for stepper in (first, second):
        step(stepper)
    np.testing.assert_allclose(second.replica.parameters, first.replica.parameters, rtol=1e-6)


# ---------------------------------------------------------------- optimisers of somebody else's


class Picky(torch.optim.SGD):
    """Takes no sparse gradients, and none of one element."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad.is_sparse or p.numel() == 1:
                    self.check(p.grad)

    def check(self, gradient: Tensor) -> None:
        raise RuntimeError("not one of these")


@pytest.mark.parametrize(
    ("is_sparse", "at"),
    [(True, 'parameter "0.weight", whose gradient is sparse,'), (False, 'parameter "1.bias"')],
)
def test_an_error_in_the_step_of_an_optimiser_is_the_job_s_and_names_the_parameter(
    monkeypatch: pytest.MonkeyPatch, at: str, *, is_sparse: bool
) -> None:
    monkeypatch.setattr(Words, "model", lambda self: nn.Sequential(
        nn.EmbeddingBag(7, 3, sparse=is_sparse), nn.Linear(3, 1)))  # fmt: skip
    stepper = stepper_of(Words(), Choice(name=f"{__name__}:Picky", options={"lr": 0.1}))
    with pytest.raises(TaskError) as caught:
        step(stepper)
    error = caught.value
    assert error.message == (
        f"the step of the inner optimiser {__name__}:Picky for {at} raised RuntimeError: "
        "not one of these"
    )
    assert (error.where or "").startswith(f"{__file__}:")
    assert not failure_of(error).error.startswith("a bug")


def test_without_a_parameter_that_is_sure_none_is_named() -> None:
    class Blind(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ValueError("no")

    stepper = stepper_of(Words(), choice("sgd", momentum=0.1))
    stepper.inner._steps = [Blind(stepper.replica.values, lr=0.1).step]
    with pytest.raises(
        TaskError, match=r"^the step of the inner optimiser sgd raised ValueError: n"
    ):
        step(stepper)


def test_a_step_along_a_gradient_from_elsewhere_takes_dense_ones() -> None:
    """As those of all-reduce, which are dense whatever the model's are."""
    stepper = stepper_of(Words(), choice("adamw"))
    stepper.along(np.ones_like(stepper.replica.parameters), 0.1)
    sparse = stepper_of(Words(is_alone=True), choice("sparseadam"))
    with pytest.raises(TaskError, match="sparseadam"):
        sparse.along(np.ones_like(sparse.replica.parameters), 0.1)


class Sides(torch.optim.Optimizer):
    """Keeps what Shampoo and SOAP do: matrices larger than the parameter, lists of tensors with an
    empty one among them, and a count of steps in its group.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                g, state = p.grad.reshape(len(p), -1), self.state[p]
                if not state:
                    state["left"] = torch.zeros(len(g), len(g))
                    state["sides"] = [[], torch.zeros(g.shape[1], g.shape[1])]
                state["left"] += g @ g.T
                state["sides"][1] += g.T @ g
                step = (torch.eye(len(g)) + state["left"]) @ g
                step = step @ (torch.eye(g.shape[1]) + state["sides"][1]) / group["step"]
                p -= group["lr"] * step.reshape(p.shape)


class Tall:
    """A parameter for which m * m exceeds m * n."""

    def model(self) -> nn.Module:
        return nn.Linear(2, 9)

    def dataset(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(torch.tensor([[0.3, -0.2]])).square().sum()


@pytest.mark.parametrize("how", ["checkpoint", "another replica"])
def test_an_optimiser_goes_on_whatever_it_keeps(how: str) -> None:
    chosen = Choice(name=f"{__name__}:Sides", options={"lr": 0.1})
    first, second = stepper_of(Tall(), chosen), stepper_of(Tall(), chosen)

    def steps(stepper: Stepper) -> None:
        stepper.step([(BATCH, 1.0)], own_lr=0.1, gather=False)

    for _ in range(3):
        steps(first)
    second.replica.parameters[:] = first.replica.parameters
    if how == "checkpoint":
        saved = {name: np.array(array) for name, array in first.state().items()}
        assert all(array.dtype != object for array in saved.values())
        second.restore(saved)
    else:
        second.inner.take_packed(first.inner.packed())
    (group,) = second.inner._optimizers[0].param_groups
    assert group["step"] == 3
    for stepper in (first, second):
        steps(stepper)
    np.testing.assert_array_equal(second.replica.parameters, first.replica.parameters)


def test_a_forgotten_state_begins_with_the_options_of_the_first_step() -> None:
    stepper = stepper_of(Tall(), Choice(name=f"{__name__}:Sides", options={"lr": 0.1}))
    stepper.step([(BATCH, 1.0)], own_lr=0.1, gather=False)
    stepper.inner.forget()
    (group,) = stepper.inner._optimizers[0].param_groups
    assert "step" not in group
