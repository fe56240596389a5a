"""What `run.optimizer` returns: a torch optimizer for the script, a gradient for the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import MODELS, Image, backward, image
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer, lr_scheduler

from daemons.attach.model_vector import ModelVector
from daemons.attach.run_optimizer import RunOptimizer
from daemons.attach.user_optimizer import UserOptimizer
from dlctl.errors import DlctlError

RATE = 0.2


def made(**options: Any) -> tuple[Image, ModelVector, RunOptimizer]:
    model = image()
    vector = ModelVector(model)
    return model, vector, RunOptimizer(vector, lr=RATE, **options)


def gradient_of(model: Image, vector: ModelVector, step: int) -> tuple[np.ndarray, float]:
    backward(model, step)
    out = vector.room()
    norm = vector.gather_gradient(out)
    model.zero_grad()
    return out, norm


def test_a_step_hands_over_the_gradient_once_and_leaves_the_model() -> None:
    model, vector, optimizer = made()
    wanted, norm = gradient_of(model, vector, 1)
    was = vector.vector.copy()
    backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    assert not vector.has_gradient()
    taken = optimizer.take()
    assert taken is not None
    assert (taken[0].tobytes(), taken[1]) == (wanted.tobytes(), norm)
    assert optimizer.take() is None
    vector.gather()
    assert np.array_equal(vector.vector, was)


def test_what_the_script_clips_is_clipped() -> None:
    model, _, optimizer = made()
    backward(model, 1)
    clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    assert optimizer.take()[1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_closure_is_called_once(is_named: bool) -> None:
    model, vector, optimizer = made()
    wanted, _ = gradient_of(model, vector, 3)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        backward(model, 3)
        return 1.5

    with torch.no_grad():
        loss = optimizer.step(closure=closure) if is_named else optimizer.step(closure)
    assert (loss, calls) == (1.5, [True])
    assert optimizer.take()[0].tobytes() == wanted.tobytes()


def test_a_closure_may_leave_a_batch_out() -> None:
    _, _, optimizer = made()
    assert optimizer.step(lambda: None) is None
    assert optimizer.take() is None


def test_a_grad_scaler_unscales_it_or_leaves_nothing() -> None:
    model, vector, optimizer = made()
    wanted, _ = gradient_of(model, vector, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scaler.scale(torch.ones(()))
    backward(model, 1)
    for parameter in model.parameters():
        parameter.grad.mul_(8)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.take()[0].tobytes() == wanted.tobytes()
    model.head.bias.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.take() is None
    assert scaler.get_scale() == 4


def test_a_gradient_that_is_not_finite_is_told_by_its_norm() -> None:
    model, _, optimizer = made()
    backward(model, 1)
    model.head.bias.grad.fill_(math.nan)
    optimizer.step()
    assert not math.isfinite(optimizer.take()[1])


# ---------------------------------------------------------------- misuse


def test_two_steps_without_the_runs_are_refused() -> None:
    model, _, optimizer = made()
    backward(model, 1)
    optimizer.step()
    with pytest.raises(DlctlError) as refused:
        optimizer.step()
    assert "run.step()" in refused.value.message
    assert optimizer.take() is not None
    optimizer.step()


def test_a_step_before_backward_is_refused() -> None:
    _, _, optimizer = made()
    with pytest.raises(DlctlError) as refused:
        optimizer.step()
    assert "backward" in refused.value.hint
    assert optimizer.take() is None


# ---------------------------------------------------------------- rates


def warm_up(optimizer: Optimizer) -> list[Any]:
    return [lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)]


def in_turn(optimizer: Optimizer) -> list[Any]:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2),
        lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ]
    return [lr_scheduler.SequentialLR(optimizer, parts, [2])]


def one_cycle(optimizer: Optimizer) -> list[Any]:
    return [lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=20, cycle_momentum=False)]


@pytest.mark.parametrize("make", [warm_up, in_turn, one_cycle])
def test_a_scheduler_sets_the_factor_of_the_runs_rate(
    make: Callable[[Optimizer], list[Any]],
) -> None:
    """Which is that of the same scheduler with an optimizer of torch's."""
    model, _, optimizer = made()
    theirs = torch.optim.SGD(image().parameters(), lr=RATE)
    assert optimizer.rate_factor == 1
    schedulers = [*make(optimizer), *make(theirs)]
    factors = set()
    for step in range(8):
        backward(model, step)
        optimizer.step()
        theirs.step()
        optimizer.take()
        assert optimizer.rate_factor == theirs.param_groups[0]["lr"] / RATE
        factors.add(optimizer.rate_factor)
        for scheduler in schedulers:
            scheduler.step()
    assert len(factors) > 2


def test_a_rate_that_no_factor_expresses_is_refused() -> None:
    model, _, optimizer = made()
    (group,) = optimizer.param_groups
    for wrong in (-0.1, math.nan, math.inf):
        group["lr"] = wrong
        with pytest.raises(DlctlError):
            _ = optimizer.rate_factor
    group["lr"] = torch.tensor(RATE / 2)
    assert optimizer.rate_factor == pytest.approx(0.5)
    group["params"] = [each for each in group["params"] if each is not model.head.bias]
    optimizer.add_param_group({"params": [model.head.bias], "lr": 0.5})
    with pytest.raises(DlctlError) as refused:
        _ = optimizer.rate_factor
    assert "0.5" in refused.value.message
    optimizer.param_groups[1]["lr"] = group["lr"]
    assert optimizer.rate_factor == pytest.approx(0.5)


# ---------------------------------------------------------------- along the mean


@pytest.mark.parametrize("how", [*MODELS])
def test_the_users_own_optimizer_steps_along_the_mean(how: str) -> None:
    """Two workers with a gradient each, as one script with both: the rates are the user's."""
    alone = MODELS[how]()
    plain = torch.optim.AdamW(alone.parameters(), lr=0.1)
    models = [MODELS[how]() for _ in range(2)]
    vectors = [ModelVector(model) for model in models]
    users = [
        UserOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), vector)
        for model, vector in zip(models, vectors, strict=True)
    ]
    optimizers = [
        RunOptimizer(vector, user.optimizer) for vector, user in zip(vectors, users, strict=True)
    ]
    schedulers = [lr_scheduler.StepLR(each, 2) for each in (plain, *optimizers)]
    for step in range(4):
        taken = []
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, 2 * step + number)
            optimizer.step()
            optimizer.zero_grad()
            taken.append(optimizer.take()[0])
            backward(alone, 2 * step + number)
        mean = (taken[0] + taken[1]) / 2
        for user in users:
            user.step_along(mean)
        for parameter in alone.parameters():
            parameter.grad.div_(2)
        plain.step()
        plain.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    for vector in vectors:
        vector.gather()
    assert np.array_equal(vectors[0].vector, vectors[1].vector)
    assert [user.steps for user in users] == [0, 0]
    assert optimizers[0].rate_factor == 1
    assert users[0].optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    np.testing.assert_allclose(vectors[0].vector, ModelVector(alone).vector, rtol=1e-3, atol=1e-5)


def test_an_optimizer_that_leaves_a_trained_parameter_out_is_refused() -> None:
    model = image()
    with pytest.raises(DlctlError) as refused:
        RunOptimizer(ModelVector(model), torch.optim.SGD(model.conv.parameters(), lr=1))
    assert '"norm.weight"' in refused.value.message
    model.norm.requires_grad_(False)
    model.head.requires_grad_(False)
    RunOptimizer(ModelVector(model), torch.optim.SGD(model.conv.parameters(), lr=1))


# ---------------------------------------------------------------- as any optimizer of torch's


def test_state_dicts_are_saved_and_loaded() -> None:
    model, _, optimizer = made()
    lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    saved = optimizer.state_dict()
    other = made()[2]
    other.load_state_dict(saved)
    assert other.rate_factor == 0.5
    backward(model, 0)
    assert other.param_groups[0]["params"][0] is other._model.parameters[0]


def test_a_state_dict_is_that_of_the_users_own_optimizer() -> None:
    model = image()
    vector, own = ModelVector(model), torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer, user = RunOptimizer(vector, own), UserOptimizer(own, vector)
    user.step_along(np.ones_like(vector.vector))
    saved = optimizer.state_dict()
    assert saved["state"][0]["step"] == 1
    user.forget()
    own.param_groups[0]["lr"] = 0.3
    optimizer.load_state_dict(saved)
    assert own.state[model.conv.weight]["step"] == 1
    assert optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"] == 0.1
    # A scheduler of either changes the rate of both.
    lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert own.param_groups[0]["lr"] == 0.05


class Wrapper(Optimizer):
    """As accelerate's: one of torch's by its class alone. It moves the state, and replaces `step`
    of the wrapped one while a scaler may skip it.
    """

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.optimizer, self.scaler, self.has_stepped = optimizer, scaler, False
        self._step = optimizer.step
        optimizer.load_state_dict(optimizer.state_dict())

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        def stepping(*args: Any) -> Any:
            self.has_stepped = True
            return self._step(*args)

        self.optimizer.step, self.has_stepped = stepping, False
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.step = self._step


def test_a_wrapper_steps_it_like_another() -> None:
    model, vector, optimizer = made()
    wanted, _ = gradient_of(model, vector, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    wrapper = Wrapper(optimizer, scaler)
    scaler.scale(torch.ones(()))
    backward(model, 1)
    wrapper.step()
    assert wrapper.has_stepped
    assert optimizer.take()[0].tobytes() == wanted.tobytes()
    model.head.bias.grad.fill_(math.inf)
    wrapper.step()
    assert not wrapper.has_stepped
    assert optimizer.take() is None
    wrapper.zero_grad()
    assert not vector.has_gradient()


def test_a_wrapped_optimizer_of_the_users_is_found() -> None:
    model = image()
    vector, own = ModelVector(model), torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = Wrapper(own, torch.amp.GradScaler("cpu", enabled=False))
    user = UserOptimizer(wrapper, vector)
    assert user.optimizer is own
    backward(model, 0)
    wrapper.step()
    assert user.steps == 1
    assert RunOptimizer(vector, wrapper).param_groups is own.param_groups
