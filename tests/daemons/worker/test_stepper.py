"""A replica's own steps are torch's, to the bit; what becomes of a gradient before it is used."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from stepping import SEED, choice, stepper_of
from torch import Tensor, nn

from daemons.worker import inner_optimizer
from daemons.worker.stepper import SCALER
from daemons.worker.task.user_task import TaskError
from dlctl import registry
from dlctl.errors import DlctlError
from dlctl.job.config import Choice, ParameterGroup
from dlctl.job.inner import OF, keeps_nothing

STEPS = 4
NAMES = [
    name
    for name in registry.BUILT_IN["inner_optimizers"]
    if registry.load("inner_optimizers", name).torch
]
DENSE = [name for name in NAMES if name != "sparseadam"]
FUSED = {torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW}


def reference(task: Any) -> nn.Module:
    torch.manual_seed(SEED)
    return task.model().train()


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def optimizers_of(
    chosen: Choice, model: nn.Module, *, is_fused: bool = True
) -> list[torch.optim.Optimizer]:
    """As a script would make them. is_fused: with torch's fused kernels, where it has them."""
    options, parameters = dict(chosen.options), list(model.parameters())
    kind = getattr(torch.optim, registry.load("inner_optimizers", chosen.name).torch)
    if (rest := options.pop("adamw", None)) is None:
        fused = {"fused": True} if is_fused and kind in FUSED else {}
        return [kind(parameters, **options, **fused)]
    matrices = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2]
    return [kind(matrices, **options), torch.optim.AdamW(others, **rest, fused=is_fused)]


# ---------------------------------------------------------------- own steps


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "loop"])
@pytest.mark.parametrize("name", DENSE)
def test_own_steps_are_those_of_torch_to_the_bit(zoo, name: str, *, is_fused: bool) -> None:
    """Of its fused kernels, if it has some; its loop over the tensors rounds differently."""
    task, chosen = zoo["mlp"], choice(name)
    stepper, model = stepper_of(task, chosen, clip_norm=0.05), reference(task)
    optimizers = optimizers_of(chosen, model, is_fused=is_fused)
    for number in range(STEPS):
        lr = chosen.options["lr"] / (number + 1)  # A schedule.
        step = stepper.step([(task.batch(), 1.0)], own_lr=lr, gather=False)
        model.zero_grad()
        loss = task.loss(model, task.batch())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for optimizer in optimizers:
            scale = optimizer.defaults["lr"] / chosen.options["lr"]
            optimizer.param_groups[0]["lr"] = lr * scale
            optimizer.step()
        assert (step.loss, step.is_usable, step.gradient) == (float(loss.detach()), True, None)
        assert step.norm == pytest.approx(float(norm), rel=1e-6)
        tolerance = 0.0 if is_fused else 1e-6
        np.testing.assert_allclose(
            stepper.replica.parameters, flat(model), rtol=tolerance, atol=tolerance / 10
        )


@pytest.mark.parametrize("name", ["adagrad", "adam", "adamw", "muon", "sgd"])
@pytest.mark.parametrize("lies", ["values", "gradients"])
def test_memory_in_another_order_is_stepped_alike(name: str, lies: str) -> None:
    """torch's fused kernels ignore strides."""
    chosen = choice(name, **{"momentum": 0.9} if name == "sgd" else {})
    rng = torch.Generator().manual_seed(SEED)
    values, gradients = (torch.randn(2, 5, 4, generator=rng).unbind() for _ in range(2))
    turned = [[each.t().contiguous().t() for each in mine] for mine in (values, gradients)]
    usual = inner_optimizer.InnerOptimizer(chosen, [each.clone() for each in values])
    other = inner_optimizer.InnerOptimizer(
        chosen, turned[0] if lies == "values" else [each.clone() for each in values]
    )
    for _ in range(STEPS):
        usual.step(gradients, 1e-2)
        other.step(gradients if lies == "values" else turned[1], 1e-2)
    for a, b in zip(usual.tensors, other.tensors, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", [n for n in DENSE if n != "adafactor"])
def test_a_tensor_may_get_its_first_gradient_late(name: str) -> None:
    chosen = choice(name, **{"momentum": 0.9} if name == "sgd" else {})
    rng = torch.Generator().manual_seed(SEED)
    values, gradients = (torch.randn(2, 5, 4, generator=rng).unbind() for _ in range(2))
    both = inner_optimizer.InnerOptimizer(chosen, [each.clone() for each in values])
    alone = inner_optimizer.InnerOptimizer(chosen, [values[1].clone()])
    both.step([gradients[0], None], 1e-2)
    for _ in range(2):
        both.step(gradients, 1e-2)
        alone.step([gradients[1]], 1e-2)
    torch.testing.assert_close(both.tensors[1], alone.tensors[0])


@pytest.mark.parametrize("name", ["adagrad", "adam", "adamw"])
@pytest.mark.parametrize("size", [1, 3, 400])
def test_a_state_of_another_size_is_refused(name: str, size: int) -> None:
    """A kernel that does not check sizes would use memory beyond it."""
    optimizer = inner_optimizer.InnerOptimizer(choice(name), [torch.zeros(5, 4)])
    optimizer.step([torch.ones(5, 4)], 1e-2)
    state = optimizer.state()
    for key in [key for key, array in state.items() if key != OF]:
        changed = state | {key: np.ones(size if state[key].ndim else 2, np.float32)}
        with pytest.raises(DlctlError):
            optimizer.restore(changed)


def test_a_class_of_torch_by_its_path_has_the_job_s_own_arguments() -> None:
    for more in ({"fused": False}, {"fused": True}, {"foreach": True}, {"differentiable": True}):
        chosen = Choice(name="torch.optim:AdamW", options={"lr": 1e-2, **more})
        optimizer = inner_optimizer.InnerOptimizer(chosen, [torch.zeros(5, 4)])
        optimizer.step([torch.ones(5, 4)], 1e-2)
        assert optimizer.tensors[0].max() < 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by torch's Adagrad
@pytest.mark.parametrize("name", ["adagrad", "sparseadam", "sgd"])
def test_sparse_gradients_have_an_optimiser_too(name: str) -> None:
    class Rows:
        def model(self) -> nn.Module:
            return nn.Embedding(7, 3, sparse=True)

        def dataset(self) -> list[int]:
            return [0]

        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch).square().sum()

        def batch(self) -> Tensor:
            return torch.tensor([1, 4, 4])

    task, chosen = Rows(), choice(name)
    stepper, model = stepper_of(task, chosen), reference(task)
    (optimizer,) = optimizers_of(chosen, model, is_fused=False)  # It takes no sparse gradients.
    for _ in range(STEPS):
        stepper.step([(task.batch(), 1.0)], own_lr=chosen.options["lr"], gather=False)
        model.zero_grad()
        task.loss(model, task.batch()).backward()
        optimizer.step()
    np.testing.assert_allclose(stepper.replica.parameters, flat(model), rtol=1e-6)


@pytest.mark.parametrize("name", DENSE)
def test_what_an_optimiser_keeps_goes_on_in_another_process(zoo, name: str) -> None:
    task, chosen = zoo["mlp"], choice(name)
    first, second = stepper_of(task, chosen), stepper_of(task, chosen)
    for _ in range(2):
        first.step([(task.batch(), 1.0)], own_lr=1e-3, gather=False)
    second.replica.parameters[:] = first.replica.parameters
    second.restore(first.state())
    for stepper in (first, second):
        stepper.step([(task.batch(), 1.0)], own_lr=1e-3, gather=False)
    assert np.array_equal(first.replica.parameters, second.replica.parameters)


@pytest.mark.parametrize(
    "chosen",
    [
        *map(choice, DENSE),
        choice("sgd", weight_decay=0.1, dampening=0.1),
        choice("sgd", momentum=0.9),
    ],
    ids=lambda chosen: chosen.name,
)
def test_of_whom_nothing_is_saved_keeps_nothing(zoo, chosen: Choice) -> None:
    stepper = stepper_of(zoo["mlp"], chosen)
    stepper.step([(zoo["mlp"].batch(), 1.0)], own_lr=1e-3, gather=False)
    assert keeps_nothing(chosen) == (stepper.state().keys() == {OF})


def test_the_state_of_another_optimiser_is_refused(zoo) -> None:
    muon = stepper_of(zoo["mlp"], choice("muon"))
    muon.step([(zoo["mlp"].batch(), 1.0)], own_lr=1e-3, gather=False)
    adam = stepper_of(zoo["mlp"], choice("adam"))
    with pytest.raises(DlctlError):
        adam.restore(muon.state())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (choice("adamw"), choice("rmsprop")),
        (choice("adamw"), choice("adamw", amsgrad=True)),
        (choice("sgd", momentum=0.9), choice("sgd")),
        (choice("sgd", momentum=0.9), choice("adamw")),
    ],
    ids=lambda chosen: chosen.name,
)
def test_state_that_does_not_fit_is_refused_however_large_it_is(
    zoo, before: Choice, after: Choice
) -> None:
    first = stepper_of(zoo["mlp"], before)
    first.step([(zoo["mlp"].batch(), 1.0)], own_lr=1e-3, gather=False)
    with pytest.raises(DlctlError):
        stepper_of(zoo["mlp"], after).restore(first.state())


@pytest.mark.parametrize("name", NAMES)
def test_the_options_are_those_of_torch_with_its_defaults(name: str) -> None:
    entry = registry.load("inner_optimizers", name)
    theirs = inspect.signature(getattr(torch.optim, entry.torch)).parameters
    ours = dataclasses.asdict(entry.Options())
    ours.pop("adamw", None)
    assert ours == {key: theirs[key].default for key in ours}


def test_an_optimiser_of_somebody_else_s_is_made_by_its_path(zoo) -> None:
    by_path = Choice(name="torch.optim:SGD", options={"lr": 0.1, "momentum": 0.5})
    known = choice("sgd", lr=0.1, momentum=0.5)
    one, other = stepper_of(zoo["mlp"], by_path), stepper_of(zoo["mlp"], known)
    for stepper in (one, other, one, other):
        stepper.step([(zoo["mlp"].batch(), 1.0)], own_lr=0.1, gather=False)
    assert np.array_equal(one.replica.parameters, other.replica.parameters)


def test_a_step_may_be_made_and_its_gradient_handed_out(zoo) -> None:
    task = zoo["mlp"]
    stepper, alone = stepper_of(task, choice("sgd", lr=0.1)), stepper_of(task)
    before = stepper.replica.parameters.copy()
    expected = alone.step([(task.batch(), 1.0)])
    step = stepper.step([(task.batch(), 1.0)], own_lr=0.1)
    assert np.array_equal(step.gradient, expected.gradient)
    np.testing.assert_allclose(
        stepper.replica.parameters, before - np.float32(0.1) * step.gradient, rtol=1e-6, atol=1e-8
    )


BIASES = ParameterGroup(match=("*.bias",), weight_decay=0.0)
FIRST = ParameterGroup(match=("*.bias", "0.*"), lr_scale=0.3, weight_decay=0.2)


def in_groups(chosen: Choice, model: nn.Module) -> list[torch.optim.Optimizer]:
    """As a script would make them: biases have no decay, the first layer its own and a rate."""
    made = []
    for optimizer in optimizers_of(chosen, model):
        kinds: dict[str, list[nn.Parameter]] = {"rest": [], "biases": [], "first": []}
        for name, parameter in model.named_parameters():
            if any(parameter is p for p in optimizer.param_groups[0]["params"]):
                is_first = "first" if name.startswith("0.") else "rest"
                kinds["biases" if name.endswith(".bias") else is_first].append(parameter)
        own = {"biases": {"weight_decay": 0.0}, "first": {"weight_decay": 0.2}}
        options = {k: v for k, v in optimizer.defaults.items() if k in chosen_options(optimizer)}
        groups = [
            {"params": mine, "lr_scale": 0.3 if kind == "first" else 1.0, **own.get(kind, {})}
            for kind, mine in kinds.items()
            if mine
        ]
        made.append(type(optimizer)(groups, **options))
    return made


def chosen_options(optimizer: torch.optim.Optimizer) -> list[str]:
    return [*inspect.signature(type(optimizer)).parameters]


@pytest.mark.parametrize("name", DENSE)
def test_own_steps_in_groups_are_those_of_torch_to_the_bit(zoo, name: str) -> None:
    task, chosen = zoo["mlp"], choice(name)
    stepper, model = stepper_of(task, chosen, (BIASES, FIRST)), reference(task)
    optimizers = in_groups(chosen, model)
    for number in range(STEPS):
        lr = chosen.options["lr"] / (number + 1)  # A schedule.
        stepper.step([(task.batch(), 1.0)], own_lr=lr, gather=False)
        model.zero_grad()
        task.loss(model, task.batch()).backward()
        for optimizer in optimizers:
            scale = optimizer.defaults["lr"] / chosen.options["lr"]
            for group in optimizer.param_groups:
                group["lr"] = lr * (scale * group["lr_scale"])
            optimizer.step()
        assert np.array_equal(stepper.replica.parameters, flat(model)), number


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_what_an_optimiser_keeps_goes_on_with_other_groups(zoo, name: str) -> None:
    """It is of the tensors, wherever they are: those of one shape must not be mistaken."""
    task, chosen = zoo["mlp"], choice(name)
    groups = (ParameterGroup(match=("2.*", "0.bias")),)  # Nothing is changed but the order.
    first, second = stepper_of(task, chosen, groups), stepper_of(task, chosen)
    for _ in range(2):
        first.step([(task.batch(), 1.0)], own_lr=1e-3, gather=False)
    second.replica.parameters[:] = first.replica.parameters
    second.restore(first.state())
    for stepper in (first, second):
        stepper.step([(task.batch(), 1.0)], own_lr=1e-3, gather=False)
    assert np.array_equal(first.replica.parameters, second.replica.parameters)


def test_a_peak_of_nothing_keeps_the_scales_of_the_groups(zoo) -> None:
    task = zoo["mlp"]
    stepper = stepper_of(task, choice("sgd", lr=0.0), (ParameterGroup(match=("*",), lr_scale=0.5),))
    plain = stepper_of(task, choice("sgd", lr=0.0))
    stepper.step([(task.batch(), 1.0)], own_lr=0.2, gather=False)
    plain.step([(task.batch(), 1.0)], own_lr=0.1, gather=False)
    assert np.array_equal(stepper.replica.parameters, plain.replica.parameters)


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("own_lr", [None, 0.1])
@pytest.mark.parametrize("factor", [np.nan, np.inf, 1e30])
def test_of_what_is_not_finite_nothing_is_used(
    task_of, factor: float, own_lr: float | None
) -> None:
    """The squares of the last one are not."""
    task = task_of(loss=lambda model, batch: factor * model(batch).sum())
    stepper = stepper_of(task, choice("sgd", lr=0.1))
    before = stepper.replica.parameters.copy()
    step = stepper.step([(torch.ones(1, 6), 1.0)], own_lr=own_lr)
    assert not step.is_usable
    assert not (np.isfinite(step.loss) and np.isfinite(step.norm))
    assert np.array_equal(stepper.replica.parameters, before)


def test_nothing_is_used_of_what_no_server_would_take_unless_it_is_clipped(zoo) -> None:
    task = zoo["mlp"]
    free, clipped = stepper_of(task), stepper_of(task, clip_norm=1e-4)
    norm = free.step([(task.batch(), 1.0)]).norm
    assert not free.step([(task.batch(), 1.0)], norm_max=norm / 2).is_usable
    assert free.step([(task.batch(), 1.0)], norm_max=norm).is_usable
    step = clipped.step([(task.batch(), 1.0)], norm_max=norm / 2)
    assert step.is_usable
    assert step.norm == norm
    assert np.linalg.norm(step.gradient) == pytest.approx(1e-4, rel=1e-2)


def test_several_batches_are_one_step_of_all_their_samples(zoo, task_of) -> None:
    task = task_of(loss=lambda model, batch: model(batch).square().mean())
    whole = zoo["mlp"].batch()
    alone, parts = stepper_of(task), stepper_of(task)
    expected = alone.step([(whole, 1.0)])
    n = len(whole)
    step = parts.step([(whole[: n - 1], (n - 1) / n), (whole[n - 1 :], 1 / n)])
    assert step.loss == pytest.approx(expected.loss, rel=1e-6)
    np.testing.assert_allclose(step.gradient, expected.gradient, rtol=1e-5, atol=1e-7)


def test_bf16_is_torch_s_autocast(zoo) -> None:
    task = zoo["mlp"]
    step, model = stepper_of(task, precision="bf16").step([(task.batch(), 1.0)]), reference(task)
    with torch.autocast("cpu", torch.bfloat16):
        loss = task.loss(model, task.batch())
    loss.backward()
    assert step.loss == float(loss.detach())
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()
    assert np.array_equal(step.gradient, gradient)


class Overflows:
    """A loss whose gradient is finite, and infinite as soon as it is scaled by more than `most`."""

    def __init__(self, most: float) -> None:
        self.most = most

    def model(self) -> nn.Module:
        return nn.Linear(2, 1, bias=False)

    def dataset(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return Bounded.apply(model.weight.sum(), self.most)


class Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.where(gradient.abs() > ctx.most, gradient / 0, gradient), None


def test_a_step_whose_scaled_gradient_is_infinite_is_skipped_and_the_scale_goes_down() -> None:
    stepper = stepper_of(Overflows(2.0**14), choice("sgd", lr=0.5), precision="fp16")
    before = stepper.replica.parameters.copy()
    steps = [stepper.step([(torch.ones(1), 1.0)], own_lr=0.5) for _ in range(3)]
    assert [step.is_skipped for step in steps] == [True, True, False]  # 2**16, 2**15, 2**14
    assert [step.is_usable for step in steps] == [False, False, True]
    assert steps[-1].norm == pytest.approx(2**0.5)
    assert np.array_equal(stepper.replica.parameters, before - np.float32(0.5))
    assert stepper.state()[SCALER].tolist() == [2.0**14, 1.0]
    other = stepper_of(Overflows(2.0**14), precision="fp16")
    other.restore(stepper.state())
    assert not other.step([(torch.ones(1), 1.0)]).is_skipped


def test_what_is_infinite_without_a_scale_is_not_skipped_for_ever() -> None:
    stepper = stepper_of(Overflows(0.0), precision="fp16")
    steps = [stepper.step([(torch.ones(1), 1.0)]) for _ in range(20)]
    assert steps[0].is_skipped
    assert not steps[-1].is_skipped
    assert not steps[-1].is_usable
    assert stepper.state()[SCALER][0] == 1.0, "the scale ends where it is none"


# ---------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("name", ["mlp", "tied"])  # One of them has a length.
def test_a_compiled_model_has_the_names_it_had(zoo, monkeypatch: pytest.MonkeyPatch, name) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: torch._dynamo.optimize("eager")(model))
    task = zoo[name]
    compiled, plain = stepper_of(task, compile=True), stepper_of(task)
    for _ in range(2):
        step = compiled.step([(task.batch(), 1.0)])
        assert np.array_equal(step.gradient, plain.step([(task.batch(), 1.0)]).gradient)
    names = [entry.name for entry in stepper_of(task, compile=True).replica.layout.entries]
    assert names == [entry.name for entry in plain.replica.layout.entries]


def test_if_it_cannot_be_compiled_the_error_says_what_to_remove(
    zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, model: nn.Module) -> None:
            pass

        def __call__(self, batch: Any) -> Tensor:
            raise torch._dynamo.exc.TorchDynamoException("no compiler here")

    monkeypatch.setattr(torch, "compile", Broken)
    task = zoo["mlp"]
    with pytest.raises(TaskError) as caught:
        stepper_of(task, compile=True).step([(task.batch(), 1.0)])
    assert "[gradient]" in (caught.value.hint or "")


# ---------------------------------------------------------------- what else a loss returns


def test_metrics_are_means_over_the_samples_of_a_step(task_of) -> None:
    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        metrics = {"first": batch[0, 0].detach(), "size": len(batch), "graph": model(batch).sum()}
        odd = {"odd": float("nan")} if len(batch) > 1 else {"odd": np.float32(4.0)}
        return model(batch).square().mean(), metrics | odd

    stepper = stepper_of(task_of(loss=loss), choice("sgd", lr=0.1))
    batches = [(torch.full((3, 6), 2.0), 0.75), (torch.full((1, 6), 6.0), 0.25)]
    found = stepper.step(batches, own_lr=0.0, gather=False).metrics
    assert (found["first"], found["size"], found["odd"]) == (3.0, 2.5, 4.0)
    one = stepper.step(batches[:1]).metrics
    assert one.keys() == {"first", "size", "graph"}, "what is not finite is left out"
    assert all(type(value) is float for value in one.values())


def test_a_loss_hears_of_the_steps_that_were_made(task_of) -> None:
    calls: list[tuple[int, int]] = []

    def loss(model: nn.Module, batch: Tensor, *, step: int, epoch: int) -> Tensor:
        calls.append((step, epoch))
        return model(batch).mean() * (float("nan") if len(calls) == 3 else 1.0)

    stepper = stepper_of(task_of(loss=loss))
    half = (torch.ones(1, 6), 0.5)
    for batches in ([half, half], [half], [half]):
        stepper.step(batches, epoch=4)
    assert calls == [(0, 4), (0, 4), (1, 4), (1, 4)], "the second step was none"


# ---------------------------------------------------------------- steps that are stopped


class Recorded:
    """An engine that is told of steps."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin_step(self, samples: int, scale: float) -> None:
        self.told.append("begin")

    def see_batch(self, batch: Any, part: float) -> None:
        self.told.append("batch")

    def discard_step(self) -> None:
        self.told.append("discard")


def test_a_stopped_step_leaves_nothing_of_its_batches_behind(zoo) -> None:
    """Its engine forgets them, and the next gradient is that of a step that was not stopped."""
    task = zoo["mlp"]
    stepper, plain = stepper_of(task), stepper_of(task)
    engine = Recorded()
    stepper._engine = engine  # type: ignore[assignment]
    batches = [(task.batch(), 0.25), (task.batch(), 0.75)]
    stopped = stepper.step(batches, is_stale=lambda: True)
    assert engine.told == ["begin", "batch", "discard"]
    assert (stopped.is_stopped, stopped.is_usable, stopped.computed) == (True, False, 0.25)
    again = stepper.step(batches)
    assert np.array_equal(again.gradient, plain.step(batches).gradient)
    assert not again.is_stopped
