"""What the task changes of its model after `model()` has returned it is refused, by its name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stepping import gradient_of
from torch import Tensor, nn

from daemons.worker.replica import TorchReplica
from daemons.worker.task import model_changes
from daemons.worker.task.user_task import Task, TaskError

BATCH = torch.linspace(-1, 1, 15).view(5, 3)
Does = Callable[["Net", int], None]


class Net(nn.Module):
    """A layer that is trained, a frozen copy of it, and whatever a test adds."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(3, 3)
        self.slow = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", None)
        self.register_buffer("scratch", None, persistent=False)
        self.unused = copy.deepcopy(self.online)

    def forward(self, x: Tensor) -> Tensor:
        return self.online(x) * self.scale


@pytest.fixture
def replica_of(task_of: Callable[..., Task]) -> Callable[[Does], TorchReplica]:
    """A replica whose loss does this first, with its model and the number of the step."""

    def make(does: Does) -> TorchReplica:
        steps = iter(range(1, 10_000))

        def loss(model: Any, batch: Tensor) -> Tensor:
            does(model, next(steps))
            return (model(batch) ** 2).mean()

        def evaluate(model: Any) -> dict[str, float]:
            return {"loss": float((model(BATCH) ** 2).mean())}

        return TorchReplica(task_of(model=Net, loss=loss, evaluate=evaluate), device="cpu", seed=0)

    return make


def average(slow: nn.Module, fast: nn.Module) -> None:
    with torch.no_grad():
        for ours, theirs in zip(slow.parameters(), fast.parameters(), strict=True):
            ours.lerp_(theirs + 1, 0.1)


def average_data(slow: nn.Module, fast: nn.Module) -> None:
    """As the code of MoCo does: no version counter tells of it."""
    for ours, theirs in zip(slow.parameters(), fast.parameters(), strict=True):
        ours.data = ours.data * 0.9 + (theirs.data + 1) * 0.1


def replace(model: Net) -> None:
    model.online.weight = nn.Parameter(model.online.weight.detach().clone())


def let_train(what: nn.Module | Tensor, trained: bool) -> None:
    what.requires_grad_(trained)


def steps_of(replica: TorchReplica, count: int) -> None:
    for _ in range(count):
        gradient_of(replica, BATCH)


REFUSED: dict[str, tuple[Does, str]] = {
    "an average in place": (
        lambda model, step: average(model.slow, model.online),
        'the task changes parameter "slow.weight", which is frozen',
    ),
    "an average of .data": (
        lambda model, step: average_data(model.slow, model.online),
        'the task changes parameter "slow.weight", which is frozen',
    ),
    "an average that is not frozen": (
        lambda model, step: average(model.unused, model.online),
        'the task changes parameter "unused.weight", which has no gradient',
    ),
    "a new layer": (
        lambda model, step: setattr(model, "head", nn.Linear(3, 3)),
        'parameter "head.weight" was made after model() had returned',
    ),
    "a new buffer": (
        lambda model, step: model.register_buffer("seen", torch.zeros(1)),
        'buffer "seen" was made after model() had returned',
    ),
    "a buffer that was None": (
        lambda model, step: setattr(model, "cache", torch.zeros(1)),
        'buffer "cache" was made after model() had returned',
    ),
    "another parameter": (
        lambda model, step: replace(model),
        'parameter "online.weight" was replaced after model() had returned',
    ),
    "a layer that is gone": (
        lambda model, step: setattr(model, "unused", None),
        'parameter "unused.bias" was removed after model() had returned',
    ),
    "a layer that is trained later": (
        lambda model, step: let_train(model.slow, step > 7),
        'parameter "slow.weight" was frozen, and has been trained (requires_grad=True)',
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_change_that_would_be_lost_is_refused_and_named(replica_of, monkeypatch, how):
    monkeypatch.setattr(model_changes, "LOOK_S", 0.0)
    does, says = REFUSED[how]
    replica = replica_of(does)
    with pytest.raises(TaskError) as caught:
        steps_of(replica, 40)
    assert caught.value.message.startswith(says)
    assert (caught.value.where or "").startswith(f"{__file__}:")
    assert caught.value.hint


def in_turns(model: Net, step: int) -> None:
    model.online.bias.requires_grad_(step // 6 % 2 == 0)


def harmless(model: Net, step: int) -> None:
    """What models do that are trained elsewhere, too."""
    model.scale = model.scale * 0.9 + 0.1
    model.scratch = torch.zeros(step)
    model.last = step
    with torch.no_grad():
        model.slow.weight.copy_(model.slow.weight.clone())
    model.slow.weight.data = model.slow.weight.data.clone()
    model.online.weight.data = model.online.weight.data.clone()


@pytest.mark.parametrize("does", [in_turns, harmless])
def test_what_is_not_lost_goes_on(replica_of, monkeypatch, does, caplog):
    monkeypatch.setattr(model_changes, "LOOK_S", 0.0)
    replica = replica_of(does)
    for _ in range(40):
        step = gradient_of(replica, BATCH)
        replica.parameters -= 0.01 * step.gradient
        replica.load_frozen({n: value + 1 for n, value in enumerate(replica.frozen())})
        replica.evaluate(replica.parameters, replica.averaged())
    assert not caplog.records


@pytest.mark.parametrize("when", ["before", "in"])
def test_an_evaluation_is_not_of_a_model_that_is_not_saved(replica_of, monkeypatch, when):
    """Whenever the last look was."""
    replica = replica_of(lambda model, step: None)
    steps_of(replica, 5)
    if when == "before":
        average(replica.model.slow, replica.model.online)
    else:
        hook = lambda model, _: average(model.slow, model.online)  # noqa: E731
        replica.model.register_forward_pre_hook(hook)
    with pytest.raises(TaskError, match=r'"slow\.weight"'):
        replica.evaluate(replica.parameters, replica.averaged())


def test_looks_become_seldom(replica_of, monkeypatch):
    """After 1, 2, 4 ... steps, and else every 10 s."""
    now = [100.0]
    monkeypatch.setattr(model_changes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    replica = replica_of(lambda model, step: None)
    made, looks = [0], []
    monkeypatch.setattr(replica._changes, "check", lambda: looks.append(made[0]))
    for made[0] in range(1, 40):
        now[0] += 2
        gradient_of(replica, BATCH)
    assert looks[:6] == [1, 2, 4, 8, 13, 16]
    assert len(looks) <= 5 + 39 * 0.2 + 1
