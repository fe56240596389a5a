"""Each module trains in the mode in which `model()` has left it, before and after an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from stepping import gradient_of
from torch import Tensor, nn

from daemons.worker.replica import TorchReplica
from daemons.worker.task.module_modes import Modes
from daemons.worker.task.user_task import Task

BATCH = torch.arange(12.0).view(2, 6)


def net() -> nn.Sequential:
    body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    return nn.Sequential(body, nn.BatchNorm1d(4), nn.Linear(4, 1))


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def with_frozen_norm() -> nn.Module:
    model = net()
    model[0][1].eval()
    return model


def with_head_alone() -> nn.Module:
    model = net().eval()
    model[2].train()
    return model


class KeepsStatistics(nn.Sequential):
    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self[1].eval()
        return self


@pytest.mark.parametrize(
    ("model", "in_eval"),
    [
        (net, set()),
        (lambda: net().eval(), set()),  # As after from_pretrained.
        (with_frozen_norm, {"0.1"}),
        (with_head_alone, {"", "0", "0.0", "0.1", "0.2", "1"}),
        (lambda: KeepsStatistics(*net()), {"1"}),
    ],
    ids=["none", "whole", "norm", "head", "overrides"],
)
def test_a_module_keeps_its_mode_in_training_and_after_an_evaluation(
    task_of: Callable[..., Task], model: Callable[[], nn.Module], in_eval: set[str]
) -> None:
    seen: list[dict[str, bool]] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(modes(model))
        return model(batch).square().mean()

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not any(modes(model).values())
        model.train()
        return {}

    replica = TorchReplica(task_of(model=model, loss=loss, evaluate=evaluate), device="cpu", seed=0)
    for _ in range(2):
        gradient_of(replica, BATCH)
        replica.evaluate(replica.parameters, replica.averaged())
        seen.append(modes(replica.model))
    assert all({name for name, is_on in each.items() if not is_on} == in_eval for each in seen)


def test_a_frozen_normalisation_keeps_its_statistics(task_of: Callable[..., Task]) -> None:
    replica = TorchReplica(task_of(model=with_frozen_norm), device="cpu", seed=0)
    before = replica.model[0][1].running_mean.clone()
    gradient_of(replica, BATCH)
    assert torch.equal(replica.model[0][1].running_mean, before)
    assert not torch.equal(replica.model[1].running_mean, torch.zeros(4))


def test_a_loss_that_leaves_the_model_in_eval_mode_does_not_change_the_next_batch(
    task_of: Callable[..., Task],
) -> None:
    seen = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(modes(model))
        out = model(batch).square().mean()
        model.eval()
        return out

    replica = TorchReplica(task_of(model=with_frozen_norm, loss=loss), device="cpu", seed=0)
    for _ in range(2):
        gradient_of(replica, BATCH)
    assert seen[0] == seen[1]
    assert not seen[1]["0.1"]


def test_a_mode_that_the_loss_changes_by_step_holds(task_of: Callable[..., Task]) -> None:
    def loss(model: Any, batch: Tensor) -> Tensor:
        model[1].eval()
        return model(batch).square().mean()

    replica = TorchReplica(task_of(model=net, loss=loss), device="cpu", seed=0)
    gradient_of(replica, BATCH)
    assert not replica.model[1].training


def test_the_modules_that_stay_in_eval_mode_are_listed(task_of: Callable[..., Task]) -> None:
    def lines(model: nn.Module) -> list[str]:
        return Modes(task_of(), model).described()

    assert lines(net()) == lines(net().eval()) == []
    (line,) = lines(with_frozen_norm())
    assert line.endswith("in which model() has left them: 0.1 (BatchNorm1d)")
    (line,) = lines(nn.Sequential(nn.Linear(1, 1), net().eval()))
    assert line.endswith(": 1 (Sequential)"), "not what is inside"
    (line,) = lines(nn.Sequential(*(nn.Linear(1, 1).eval() for _ in range(30)), nn.Linear(1, 1)))
    assert line.endswith("9 (Linear) and 20 more")


def test_an_evaluation_does_not_freeze_what_is_trained(task_of: Callable[..., Task]) -> None:
    def evaluate(model: nn.Module) -> dict[str, float]:
        model.requires_grad_(False)
        return {}

    replica = TorchReplica(task_of(evaluate=evaluate), device="cpu", seed=0)
    before = gradient_of(replica, torch.ones(2, 6)).gradient.copy()
    replica.evaluate(replica.parameters, replica.averaged())
    assert np.array_equal(gradient_of(replica, torch.ones(2, 6)).gradient, before)
    assert before.any()


def test_hooks_that_model_has_set_stay(task_of: Callable[..., Task]) -> None:
    """Of modules and of parameters."""

    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 1, bias=False))
        made[0].register_forward_hook(lambda module, given, out: 3 * out)
        made[0].weight.register_hook(lambda gradient: 5 * gradient)
        return made

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()

    task = task_of(model=model, loss=loss, evaluate=lambda model: {})
    replica = TorchReplica(task, device="cpu", seed=0)
    for _ in range(2):
        assert gradient_of(replica, torch.ones(2, 6)).gradient.tolist() == [15.0] * 6
        replica.evaluate(replica.parameters, replica.averaged())
