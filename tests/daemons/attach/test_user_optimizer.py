"""The user's own optimiser: counted, pulled, saved by name, restored before its first step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import MODELS, Image, backward, image, values_of
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from daemons.attach.model_vector import ModelVector
from daemons.attach.user_optimizer import UserOptimizer
from dlctl.algorithms.needs import Pull
from dlctl.errors import DlctlError
from dlctl.job.inner import OF, SAVED_AS
from dlctl.runs import checkpoints, tensorfile
from dlctl.wire.messages import Array

STEPS = 20
Kind = Callable[..., Optimizer]


class Foreign(Optimizer):
    """As third-party ones are: a count in its groups, lists and nested tensors in its state, a
    narrow dtype, a shared entry, and functions.
    """

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        defaults = {"lr": lr, "k": 0, "d": 1e-3, "modes": (True, "a"), "warm": lambda k: k}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1.5
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    kinds = (torch.bfloat16, torch.float64)
                    state["means"] = [torch.zeros_like(parameter, dtype=each) for each in kinds]
                    state["of"] = {"seen": False, "count": torch.zeros((), dtype=torch.int16)}
                    state["none"] = None
                for mean in state["means"]:
                    mean.mul_(0.5).add_(parameter.grad)
                state["of"]["seen"] = True
                state["of"]["count"] += 1
                rate = group["lr"] / (group["k"] * (1 + group["d"]))
                parameter.sub_(sum(mean.to(parameter.dtype) for mean in state["means"]) * rate)
        self.state["calls"] = self.state.get("calls", 0) + 1


class Run:
    """A script's model and optimizer, with schedulers, in a run."""

    def __init__(
        self, kind: Callable[..., Optimizer], how: str = "float32", **options: Any
    ) -> None:
        self.model = MODELS[how]()
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = kind([{"params": decayed}, {"params": others, "lr": 0.01}], **options)
        self.schedulers = [
            lr_scheduler.MultiStepLR(self.optimizer, [3, 3, 9]),
            lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step)),
        ]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.vector = ModelVector(self.model)
        self.user = UserOptimizer(self.optimizer, self.vector, self.schedulers, self.scaler)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            backward(self.model, step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()

    def takes_values_of(self, other: Run) -> None:
        other.vector.gather()
        self.vector.vector[:] = other.vector.vector
        self.vector.scatter()
        self.vector.load_averaged(other.vector.averaged())


OPTIMIZERS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.05}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "foreign": (Foreign, {}),
}


def on_disk(state: dict[str, Array], directory: Path) -> dict[str, Array]:
    """What a checkpoint keeps of it."""
    path = directory / "replica.safetensors"
    checkpoints.write_chunks(path, tensorfile.chunks(path, state))
    return {**tensorfile.read(path)}


@pytest.mark.parametrize("name", [*OPTIMIZERS])
@pytest.mark.parametrize("how", ["channels_last", "tied"])
def test_a_restored_optimizer_goes_on_to_the_bit(name: str, how: str, tmp_path: Path) -> None:
    """In a new process, where it has made no step, with its schedulers and its scaler."""
    kind, options = OPTIMIZERS[name]
    run, new = Run(kind, how, **options), Run(kind, how, **options)
    run.steps(0, STEPS // 2)
    run.scaler.scale(torch.ones(()))
    run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": 32.0, "_growth_tracker": 2})
    new.takes_values_of(run)
    new.user.restore(on_disk(run.user.state(), tmp_path))
    for each in (run, new):
        each.steps(STEPS // 2, STEPS)
    assert values_of(run.model) == values_of(new.model)
    assert [g["lr"] for g in run.optimizer.param_groups] == [
        g["lr"] for g in new.optimizer.param_groups
    ]
    assert new.scaler.state_dict() == run.scaler.state_dict()


def test_the_state_keeps_everything_of_a_third_partys(tmp_path: Path) -> None:
    run, new = Run(Foreign), Run(Foreign)
    run.steps(0, 3)
    new.user.restore(on_disk(run.user.state(), tmp_path))
    assert new.optimizer.state["calls"] == 3
    for mine, theirs in zip(run.optimizer.param_groups, new.optimizer.param_groups, strict=True):
        assert {k: v for k, v in theirs.items() if k not in ("params", "warm")} == {
            k: v for k, v in mine.items() if k not in ("params", "warm")
        }
        assert theirs["warm"](3) == 3  # The script's own.
    of_weight, of_new = (each.optimizer.state[each.model.conv.weight] for each in (run, new))
    assert [mean.dtype for mean in of_new["means"]] == [torch.bfloat16, torch.float64]
    assert all(map(torch.equal, of_weight["means"], of_new["means"]))
    assert of_new["of"] == of_weight["of"]
    assert of_new["none"] is None


def test_names_in_a_checkpoint() -> None:
    run = Run(torch.optim.AdamW, lr=0.05)
    run.steps(0, 1)
    state = run.user.state()
    assert all(name.startswith(SAVED_AS) for name in state)
    assert {"inner.state.conv.weight.exp_avg", "inner.state.head.bias.step"} <= state.keys()


def test_options_of_the_rate_that_are_tensors_remain_the_same_objects() -> None:
    """A compiled step has them."""
    model = image()
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)
    user = UserOptimizer(optimizer, ModelVector(model))
    state = {name: array.copy() for name, array in user.state().items()}
    rate.fill_(0.25)
    user.restore(state)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_schedulers_in_turn_go_on_where_they_were() -> None:
    """Those of a list, one of them with a function that cannot be saved."""

    def one() -> tuple[Optimizer, Any, UserOptimizer]:
        model = image()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        parts = [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, 9),
        ]
        scheduler = lr_scheduler.SequentialLR(optimizer, parts, [4])
        parts[0].told = print
        return optimizer, scheduler, UserOptimizer(optimizer, ModelVector(model), [scheduler])

    def rates(optimizer: Optimizer, scheduler: Any) -> list[float]:
        found = []
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    (optimizer, scheduler, user), (other, of_other, user_of_other) = one(), one()
    rates(optimizer, scheduler)
    user_of_other.restore(user.state())
    assert rates(other, of_other) == rates(optimizer, scheduler)


# ---------------------------------------------------------------- what does not fit


def of_another_class() -> UserOptimizer:
    return Run(torch.optim.Adam).user


def of_other_parameters() -> UserOptimizer:
    model = image()
    optimizer = torch.optim.AdamW([*model.conv.parameters(), *model.norm.parameters()])
    return UserOptimizer(optimizer, ModelVector(model))


def in_other_groups() -> UserOptimizer:
    model = image()
    return UserOptimizer(torch.optim.AdamW(model.parameters()), ModelVector(model))


def with_fewer_schedulers() -> UserOptimizer:
    run = Run(torch.optim.AdamW)
    return UserOptimizer(run.optimizer, run.vector, run.schedulers[:1])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (of_another_class, "torch.optim.adamw.AdamW"),
        (of_other_parameters, '"head.bias"'),
        (in_other_groups, "groups"),
        (with_fewer_schedulers, "2 schedulers"),
    ],
)
def test_the_state_of_another_optimizer_is_refused_by_name(
    make: Callable[[], UserOptimizer], named: str
) -> None:
    run = Run(torch.optim.AdamW)
    run.steps(0, 1)
    other = make()
    before = {name: array.tobytes() for name, array in other.state().items()}
    with pytest.raises(DlctlError) as refused:
        other.restore(run.user.state())
    assert named in refused.value.message
    assert refused.value.hint
    assert {name: array.tobytes() for name, array in other.state().items()} == before


def test_the_state_of_an_optimizer_of_the_job_file_is_refused() -> None:
    run = Run(torch.optim.AdamW)
    with pytest.raises(DlctlError):
        run.user.restore({OF: np.frombuffer(b'["adamw", {"momentum": false}]', np.uint8)})


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = image()
    with pytest.raises(DlctlError) as refused:
        UserOptimizer(torch.optim.SGD(image().parameters(), lr=0.1), ModelVector(model))
    assert "[4, 3, 3, 3]" in refused.value.message


def test_an_optimizer_may_have_frozen_parameters() -> None:
    model = image()
    model.conv.requires_grad_(False)
    user = UserOptimizer(torch.optim.AdamW(model.parameters()), ModelVector(model))
    backward(model, 0)
    user.optimizer.step()
    assert user.steps == 1
    user.restore({name: array.copy() for name, array in user.state().items()})


class Unhooked:
    """Written without torch's class."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups: list[Any] = [{"params": list(model.parameters())}]
        self.state: dict[Tensor, Any] = {}

    def step(self) -> None: ...


def test_an_optimizer_that_cannot_be_observed_is_refused() -> None:
    model = image()
    with pytest.raises(DlctlError):
        UserOptimizer(Unhooked(model), ModelVector(model))


# ---------------------------------------------------------------- steps


def sgd(lr: float = 0.5) -> tuple[Image, ModelVector, UserOptimizer]:
    model = image()
    vector = ModelVector(model)
    return model, vector, UserOptimizer(torch.optim.SGD(model.parameters(), lr=lr), vector)


def test_steps_of_the_script_are_counted() -> None:
    model, vector, user = sgd()
    mark = user.steps
    for step in range(3):
        backward(model, step)
        user.optimizer.step()
    user.step_along(np.ones_like(vector.vector))  # The run's.
    assert user.steps_since(mark) == 3
    assert user.steps_since(user.steps) == 0


def test_a_skipped_step_is_not_counted() -> None:
    model, _, user = sgd()
    scaler = torch.amp.GradScaler("cpu")
    backward(model, 0)
    scaler.scale(torch.ones(()))
    model.head.bias.grad.fill_(math.inf)
    scaler.step(user.optimizer)
    scaler.update()
    assert user.steps == 0


@pytest.mark.parametrize("how", [*MODELS])
def test_a_step_along_a_vector_is_that_with_its_parts_as_gradients(how: str) -> None:
    ends = []
    for is_along in (False, True):
        model = MODELS[how]()
        vector = ModelVector(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        user = UserOptimizer(optimizer, vector)
        gradient = np.linspace(-1, 2, len(vector.vector), dtype=np.float32)
        for _ in range(3):
            if is_along:
                user.step_along(gradient)
                assert not vector.has_gradient()
                continue
            for parameter, view in zip(vector.parameters, vector.views(gradient), strict=True):
                parameter.grad = torch.empty_like(parameter).copy_(view)
            optimizer.step()
        ends.append(values_of(model))
    assert ends[0] == ends[1]


def with_closure(optimizer: Optimizer, model: nn.Module) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        backward(model, 0)
        return torch.zeros(())

    optimizer.step(closure)


def with_closure_by_name(optimizer: Optimizer, model: nn.Module) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        backward(model, 0)
        return 2.5

    assert optimizer.step(closure=closure) == 2.5


def with_scaler(optimizer: Optimizer, model: nn.Module) -> None:
    """As torch does it, which has no half precision for convolutions on this device."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    backward(model, 0)
    for parameter in model.parameters():
        parameter.grad.mul_(8)
    scaler.step(optimizer)
    scaler.update()


def plainly(optimizer: Optimizer, model: nn.Module) -> None:
    backward(model, 0)
    optimizer.step()


@pytest.mark.parametrize("step", [plainly, with_closure, with_closure_by_name, with_scaler])
@pytest.mark.parametrize("fused", [False, True])
def test_a_pull_is_added_to_the_gradient_of_a_step(
    step: Callable[[Optimizer, nn.Module], None], fused: bool
) -> None:
    """Whoever computes that, and whatever its scale is."""
    model = image()
    vector = ModelVector(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    user = UserOptimizer(optimizer, vector)
    start, toward = vector.vector.copy(), vector.vector + np.float32(3)
    gradient = vector.room()
    backward(model, 0)
    vector.gather_gradient(gradient)
    optimizer.zero_grad()
    user.pull = Pull(0.25, toward)
    step(optimizer, model)
    vector.gather()
    wanted = start - 0.5 * (gradient + 0.25 * (start - toward))
    np.testing.assert_allclose(vector.vector, wanted, rtol=1e-4, atol=1e-5)
    user.pull = None
    optimizer.zero_grad()
    before = vector.vector.copy()
    plainly(optimizer, model)
    vector.gather_gradient(gradient)
    vector.gather()
    np.testing.assert_allclose(vector.vector, before - 0.5 * gradient, rtol=1e-4, atol=1e-6)


def test_a_tensor_without_a_gradient_is_not_pulled() -> None:
    model, vector, user = sgd()
    user.pull = Pull(1.0, vector.vector + 1)
    was = model.conv.weight.clone()
    model.head.bias.sum().backward()
    user.optimizer.step()
    assert torch.equal(model.conv.weight, was)


# ---------------------------------------------------------------- without a past, and another's


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_a_forgotten_state_is_that_of_a_new_optimizer(name: str) -> None:
    """But for the rate, which schedulers set."""
    kind, options = OPTIMIZERS[name]
    run, new = Run(kind, **options), Run(kind, **options)
    new.schedulers = run.schedulers = []
    run.steps(0, 3)
    new.takes_values_of(run)
    run.user.forget()
    for each in (run, new):
        each.optimizer.param_groups[0]["lr"] = 0.02
        each.steps(3, 6)
    assert values_of(run.model) == values_of(new.model)


def test_what_steps_change_in_the_groups_is_known_after_a_restart() -> None:
    run, new = Run(Foreign), Run(Foreign)
    run.steps(0, 3)
    new.user.restore({name: array.copy() for name, array in run.user.state().items()})
    assert new.optimizer.param_groups[1]["k"] == 3
    new.user.forget()
    assert [group["k"] for group in new.optimizer.param_groups] == [0, 0]


@pytest.mark.parametrize("name", ["adamw", "fused", "foreign"])
def test_a_replica_that_joins_takes_the_state_of_another(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    run, new = Run(kind, **options), Run(kind, **options)
    new.schedulers = run.schedulers = []
    assert not run.user.packed().size
    run.steps(0, 3)
    packed = run.user.packed()
    was = values_of(new.model)
    new.user.take_packed(packed)
    assert values_of(new.model) == was
    assert new.user.steps == 0
    np.testing.assert_array_equal(new.user.packed(), packed)
    new.takes_values_of(run)
    for each in (run, new):
        each.steps(3, 6)
        each.vector.gather()
    # What has more digits than float32 is rounded on the way.
    np.testing.assert_allclose(new.vector.vector, run.vector.vector, rtol=1e-4, atol=1e-6)


def test_the_state_of_another_model_is_not_taken() -> None:
    run = Run(torch.optim.AdamW)
    with pytest.raises(DlctlError):
        run.user.take_packed(np.zeros(3, np.float32))
    run.user.take_packed(np.zeros(0, np.float32))
    assert not run.optimizer.state
