"""The flat vector is the model: what autograd and state_dict say, the replica says too."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stepping import gradient_of
from torch import Tensor, nn

from daemons.worker import frozen_parameters
from daemons.worker.replica import PIECE, TorchReplica, choose_device, to_device
from daemons.worker.stepper import Stepper
from daemons.worker.task.model_tensors import find
from daemons.worker.task.user_task import Task, TaskError
from dlctl.errors import DlctlError
from dlctl.model.flat import AVERAGED, CONSTANT, TRAINED, Layout, TensorEntry

SEED = 3


def replica_of(task: Any, device: str = "cpu") -> TorchReplica:
    return TorchReplica(task if isinstance(task, Task) else Task(task), device=device, seed=SEED)


def reference(task: Any) -> nn.Module:
    """The same model, built as anybody would."""
    torch.manual_seed(SEED)
    return task.model().train()


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def assert_same_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    now = model.state_dict()
    assert list(now) == list(state)
    for name, tensor in now.items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name]), name


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    """What torch makes tensors of, and where, if nobody says it: as the task's file may set it."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


# ---------------------------------------------------------------- every animal of the zoo


def test_every_name_of_the_state_dict_is_in_the_layout(animal):
    model = reference(animal)
    layout = replica_of(animal).layout
    names = [name for e in layout.entries for name in (e.name, *e.aliases)]
    assert sorted(names) == sorted(model.state_dict())
    for entry in layout.entries:
        tensor = find(model, entry.name)
        assert entry.shape == tuple(tensor.shape)
        assert f"torch.{entry.dtype}" == str(tensor.dtype)
    assert Layout.from_bytes(layout.to_bytes()) == layout


class ByDefault:
    """Says nowhere of what dtype it is. One layer is frozen, one has buffers."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        return model

    def dataset(self) -> list[Tensor]:
        return list(torch.ones(8, 3))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"bias": float(model[2].bias)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_whatever_the_task_has_torch_take_by_default_vectors_are_float32(dtype):
    """And on the CPU, as long as the model is: "meta" stands for any other device here."""
    with defaults(dtype, None):
        replica = replica_of(ByDefault())
        batch = torch.randn(8, 3)
    with defaults(dtype, "meta"):
        step = gradient_of(replica, batch)
        own = Stepper(replica).step([(batch, 1.0)])
        metrics = replica.evaluate(replica.parameters.copy(), replica.averaged())
        replica.load_averaged(replica.averaged())
        replica.load_frozen(dict(enumerate(replica.frozen())))
    assert {entry.dtype for entry in replica.layout.entries} >= {str(dtype).removeprefix("torch.")}
    assert replica.parameters.dtype == step.gradient.dtype == np.float32
    assert replica.averaged().dtype == np.float64
    assert {tensor.dtype for tensor in replica.frozen()} <= {dtype}
    assert 0.0 < own.norm < math.inf
    assert metrics["bias"] == pytest.approx(replica.parameters[-1], rel=1e-2)


def test_two_workers_build_the_same_model_and_the_user_would_too(animal):
    one, other = replica_of(animal), replica_of(animal)
    assert np.array_equal(one.parameters, other.parameters)
    assert one.layout.to_bytes() == other.layout.to_bytes()
    assert_same_state(one.model, reference(animal).state_dict())


def test_the_flat_gradient_is_that_of_plain_autograd(animal):
    model = reference(animal)
    for parameter in model.parameters():  # float64 has float32 masters
        parameter.data.copy_(parameter.data.float())
    replica = replica_of(animal)
    for step in range(2):  # the second step must not see anything of the first
        torch.manual_seed(100 + step)
        expected_loss = animal.loss(model, animal.batch())
        model.zero_grad()
        expected_loss.backward()
        torch.manual_seed(100 + step)
        loss, gradient = gradient_of(replica, animal.batch())
        assert loss == float(expected_loss.detach())
        assert gradient.dtype == np.float32
        assert np.array_equal(gradient, plain_gradient(model, replica.layout))


def plain_gradient(model: nn.Module, layout: Layout) -> np.ndarray:
    flat = []
    for entry, _, _ in layout.slices(TRAINED):
        parameter = find(model, entry.name)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        flat.append(gradient.to_dense().float().reshape(-1).numpy())
    return np.concatenate(flat)


def test_the_gradient_is_one_buffer_that_is_used_again(animal):
    replica = replica_of(animal)
    first = gradient_of(replica, animal.batch()).gradient
    assert gradient_of(replica, animal.batch()).gradient.ctypes.data == first.ctypes.data
    assert all(parameter.grad is None for parameter in replica.model.parameters())


def test_what_is_written_to_the_parameters_is_what_computes_next(animal):
    replica = replica_of(animal)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(replica.parameters.size).astype(np.float32) / 4
    replica.parameters[:] = values
    replica.reseed(0, 0)
    loss = gradient_of(replica, animal.batch()).loss
    for entry, lo, hi in replica.layout.slices(TRAINED):
        tensor = find(replica.model, entry.name)
        written = torch.from_numpy(values[lo:hi]).view(entry.shape)
        assert torch.equal(tensor, written.to(tensor.dtype))
    replica.reseed(0, 0)
    assert float(animal.loss(replica.model, animal.batch()).detach()) == loss


def test_float32_parameters_share_the_memory_of_the_vector(zoo):
    replica = replica_of(zoo["mlp"])
    replica.parameters += 1.0
    assert replica.model[0].bias.detach().numpy().base is not None
    lo = replica.model[0].weight.numel()
    assert np.shares_memory(replica.parameters, replica.model[0].bias.detach().numpy())
    assert replica.parameters[lo] == replica.model[0].bias[0].item()


def test_a_model_that_has_moved_keeps_nothing_of_where_it_was(zoo):
    """A view of torch's holds the whole vector that it was made of, whatever its data is later."""
    replica = replica_of(zoo["tied"])
    replica.share(torch.zeros(len(replica.parameters)))
    assert all(value._base is None for value in replica.values)
    assert replica.values[0].data_ptr() == replica._vector.data_ptr()


def test_evaluation_leaves_no_trace(animal):
    replica = replica_of(animal)
    gradient_of(replica, animal.batch())
    before = copied(replica.model.state_dict())
    everything = copied(dict(replica.model.named_buffers()))
    vector, rng_state = replica.parameters.copy(), torch.get_rng_state()
    other = np.zeros_like(replica.parameters)
    metrics = replica.evaluate(other, replica.averaged())
    assert set(metrics) == {"loss"}
    assert_same_state(replica.model, before)
    for name, buffer in replica.model.named_buffers():
        assert torch.equal(buffer, everything[name])
    assert np.array_equal(replica.parameters, vector)
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert all(module.training for module in replica.model.modules())


def test_buffers_and_frozen_parameters_go_out_and_come_back(animal, tmp_path):
    replica = replica_of(animal)
    gradient_of(replica, animal.batch())
    before = copied(replica.model.state_dict())
    averaged, digests = replica.averaged(), frozen_parameters.digests(replica)
    assert averaged.dtype == np.float64
    assert averaged.shape == (replica.layout.size(AVERAGED),)
    frozen_parameters.write(replica, tmp_path / "file")
    replica.load_averaged(np.zeros_like(averaged))
    zeros = {n: torch.zeros_like(value) for n, value in enumerate(replica.frozen())}
    replica.load_frozen(zeros)
    replica.load_averaged(averaged)
    assert len(frozen_parameters.load(replica, tmp_path / "file", digests)) == len(zeros)
    assert frozen_parameters.load(replica, tmp_path / "file", digests) == []
    assert_same_state(replica.model, before)


# ---------------------------------------------------------------- what is special about some


def test_tied_parameters_are_stored_once(zoo):
    layout = replica_of(zoo["tied"]).layout
    assert layout.entries == (
        TensorEntry("embedding.weight", TRAINED, (11, 4), "float32", ("head.weight",)),
        TensorEntry("block.weight", TRAINED, (4, 4), "float32", ("again.weight",)),
        TensorEntry("block.bias", TRAINED, (4,), "float32", ("again.bias",)),
    )


def test_frozen_parameters_are_constants_and_do_not_move(zoo):
    replica = replica_of(zoo["frozen"])
    kinds = {entry.name: entry.kind for entry in replica.layout.entries}
    assert kinds == {
        "0.weight": CONSTANT,
        "0.bias": CONSTANT,
        "2.weight": TRAINED,
        "2.bias": TRAINED,
    }
    assert replica.parameters.size == 8 * 3 + 3


def test_batchnorm_statistics_are_real_and_their_count_is_not(zoo):
    replica = replica_of(zoo["conv_batchnorm"])
    names = [entry.name for entry, _, _ in replica.layout.slices(AVERAGED)]
    assert names == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    gradient_of(replica, zoo["conv_batchnorm"].batch())
    assert replica.averaged()[-1] == 1.0
    replica.load_averaged(np.full(9, 6.7))
    assert replica.model[1].num_batches_tracked.item() == 7


def test_buffers_that_are_not_saved_stay_out(zoo):
    names = [entry.name for entry in replica_of(zoo["transformer"]).layout.entries]
    assert "positions" in names
    assert "mask" in names
    assert "scratch" not in names


def test_rows_of_a_sparse_embedding_that_occur_twice_add_up(task_of):
    def model() -> nn.Module:
        return nn.Embedding(4, 2, sparse=True)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()

    replica = replica_of(task_of(model=model, loss=loss))
    gradient = gradient_of(replica, torch.tensor([1, 3, 1, 1])).gradient
    assert gradient.tolist() == [0, 0, 3, 3, 0, 0, 1, 1]


def test_low_precision_parameters_keep_float32_masters(zoo):
    replica = replica_of(zoo["bfloat16"])
    replica.parameters[:] = 1.0 + 2**-12  # bfloat16 would round it to 1
    gradient_of(replica, zoo["bfloat16"].batch())
    assert replica.parameters[0] == np.float32(1.0 + 2**-12)
    assert replica.model[0].weight[0, 0].item() == 1.0


def test_replicas_drop_other_units_but_a_restart_in_the_same_term_drops_the_same(zoo):
    def losses(slot: int, term: int) -> list[float]:
        replica = replica_of(zoo["dropout"])
        replica.reseed(slot, term)
        return [gradient_of(replica, zoo["dropout"].batch()).loss for _ in range(3)]

    assert losses(0, 0) == losses(0, 0)
    assert losses(0, 0) != losses(1, 0)
    assert losses(0, 0) != losses(0, 1)


def test_a_buffer_that_the_forward_pass_replaces_is_seen(task_of):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + len(x)
            return self.layer(x)

    replica = replica_of(task_of(model=Counting))
    gradient_of(replica, torch.ones(5, 6))
    gradient_of(replica, torch.ones(5, 6))
    assert replica.averaged().tolist() == [10.0]


def test_a_parameter_that_the_forward_pass_moves_stays_in_the_vector(task_of):
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            self.w.data = self.w.data.clamp(-1, 1)
            return self.w * x

    replica = replica_of(task_of(model=Clamped))
    gradient_of(replica, torch.ones(3))
    assert replica.parameters.tolist() == [1.0, 1.0, 1.0]
    replica.parameters[:] = 0.5
    assert replica.model.w.tolist() == [0.5, 0.5, 0.5]


def test_a_loss_that_is_not_finite_is_the_callers_matter(task_of):
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() * float("inf")

    step = gradient_of(replica_of(task_of(loss=loss)), torch.ones(1, 6))
    assert not np.isfinite(step.loss)
    assert not np.isfinite(step.gradient).all()


def test_a_failing_evaluation_restores_everything(task_of):
    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        model[0].weight.data = torch.zeros(8, 6)
        raise RuntimeError("no test set")

    replica = replica_of(task_of(evaluate=evaluate))
    before = copied(replica.model.state_dict())
    with pytest.raises(TaskError, match=r"task\.evaluate.*RuntimeError"):
        replica.evaluate(np.ones_like(replica.parameters), replica.averaged())
    assert_same_state(replica.model, before)
    assert replica.model.training
    replica.parameters[:] = 5.0
    assert replica.model[0].weight[0, 0].item() == 5.0


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_that_seeds_everything_does_not_change_what_training_draws(task_of, fails):
    def evaluate(model: nn.Module) -> dict[str, float]:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        if fails:
            raise RuntimeError("no test set")
        return {"drawn": float(np.random.random()) + random.random() + float(torch.rand(()))}

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.random()), random.random()

    def drawn(evaluates: bool) -> list[tuple[float, float, float]]:
        replica = replica_of(task_of(evaluate=evaluate))
        replica.reseed(0, 1)
        before = draw()
        if evaluates:
            with pytest.raises(TaskError) if fails else nullcontext():
                replica.evaluate(replica.parameters, replica.averaged())
        return [before, draw()]

    assert drawn(evaluates=True) == drawn(evaluates=False)


def test_evaluation_sees_the_given_values_and_read_only_arrays_are_fine(task_of):
    seen = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append(model[0].weight.detach().clone())
        return {"mean": model[0].weight.mean()}

    replica = replica_of(task_of(evaluate=evaluate))
    values = np.full(replica.parameters.size, 0.25, np.float32)
    values.flags.writeable = False
    assert replica.evaluate(values, replica.averaged()) == {"mean": 0.25}
    assert torch.equal(seen[0], torch.full((8, 6), 0.25))


def test_a_task_without_evaluate_has_no_metrics(task_of):
    replica = replica_of(task_of())
    assert replica.evaluate(replica.parameters, replica.averaged()) == {}


def test_a_block_that_model_put_into_evaluation_mode_trains_as_in_any_other_loop(task_of):
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval()

    replica = replica_of(task_of(model=model))
    gradient_of(replica, torch.arange(12.0).view(2, 6))
    assert replica.averaged()[-1] == 1.0


# ---------------------------------------------------------------- devices


def test_batches_move_in_whatever_they_are_packed():
    from collections import namedtuple

    Pair = namedtuple("Pair", "x y")
    meta = torch.device("meta")
    one = torch.ones(1)
    moved = to_device({"a": [one, (one, "text")], "pair": Pair(one, 3)}, meta)
    assert moved["a"][0].device == moved["a"][1][0].device == moved["pair"].x.device == meta
    assert moved["a"][1][1] == "text"
    assert moved["pair"].y == 3
    assert type(moved["pair"]) is Pair


def test_without_a_gpu_auto_means_the_cpu_and_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", index=3) == torch.device("cpu")
    assert choose_device("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:1"):
        with pytest.raises(DlctlError, match=f'"{name}"') as caught:
            choose_device(name)
        assert "auto" in (caught.value.hint or "")


def test_workers_are_spread_over_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(choose_device("auto", index)) for index in range(3)] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    assert str(choose_device("cuda:1")) == "cuda:1"
    with pytest.raises(DlctlError, match="2 GPUs"):
        choose_device("cuda:2")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
def test_on_a_gpu_the_vector_and_the_gradient_stay_there(zoo):
    for name in ("mlp", "conv_batchnorm", "tied", "frozen", "bfloat16", "sparse_embedding"):
        task = zoo[name]
        on_cpu, on_gpu = replica_of(task), replica_of(task, "cuda")
        on_gpu.task = Task(OnDevice(task))
        assert on_gpu.layout.to_bytes() == on_cpu.layout.to_bytes()
        assert on_gpu.parameters.is_cuda
        assert np.array_equal(on_gpu.parameters.cpu().numpy(), on_cpu.parameters)
        expected = gradient_of(on_cpu, task.batch())
        step = gradient_of(on_gpu, task.batch())
        assert step.gradient.is_cuda
        np.testing.assert_allclose(step.loss, expected.loss, rtol=2e-2)
        np.testing.assert_allclose(step.gradient.cpu(), expected.gradient, rtol=2e-2, atol=2e-2)
        norm = np.linalg.norm(expected.gradient)
        stepped = Stepper(on_gpu).step([(task.batch(), 1.0)])
        assert stepped.norm == pytest.approx(norm, rel=2e-2)
        before = on_gpu.parameters.clone()
        on_gpu.evaluate(np.zeros_like(on_cpu.parameters), on_gpu.averaged())
        assert torch.equal(on_gpu.parameters, before)
        on_gpu.parameters.zero_()
        trained = [p for p in on_gpu.model.parameters() if p.requires_grad]
        assert all(not p.any() for p in trained if p.dtype == torch.float32)


class OnDevice:
    """A task of the zoo whose loss weighs the outputs where they are."""

    def __init__(self, task: Any) -> None:
        self.model, self.dataset, self.batch = task.model, task.dataset, task.batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        output = model(batch)
        weights = torch.linspace(0.5, 1.5, output.numel(), device=output.device)
        return (output.float() ** 2 * weights.view_as(output)).mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        return {"loss": float(self.loss(model, to_device(self.batch(), device)))}


def test_a_large_parameter_is_checked_piece_by_piece(monkeypatch):
    """A mask of a whole parameter may not fit into memory."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(3 * PIECE + 1))

    task = SimpleNamespace(model=Large, dataset=lambda: [1], loss=lambda model, batch: None)
    replica = replica_of(task)
    sizes, isfinite = [], torch.isfinite
    monkeypatch.setattr(torch, "isfinite", lambda part: sizes.append(len(part)) or isfinite(part))
    replica.check_finite()
    assert sizes == [PIECE] * 3 + [1]
    replica.parameters[[PIECE - 1, PIECE, -1]] = np.nan
    with pytest.raises(TaskError, match=f'"table".* 3 of {3 * PIECE + 1} '):
        replica.check_finite()
