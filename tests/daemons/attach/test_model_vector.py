"""The user's model and its vector: values travel, the tensors stay as they are."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_models import MODELS, backward, image, tied, values_of
from torch import nn

from daemons.attach import tensor_copies
from daemons.attach.model_vector import ModelVector
from daemons.worker.frozen_parameters import FrozenFile, digests
from dlctl.errors import DlctlError
from dlctl.model.frozen import run_file
from dlctl.roles.protocol.effects import LoadFrozen
from dlctl.wire.messages import Register

STEPS = 20


def looks(model: nn.Module) -> list[tuple[int, int, tuple[int, ...], torch.dtype]]:
    """What must not change of the tensors: object, memory, strides, dtype."""
    state = model.state_dict(keep_vars=True).values()
    return [(id(t), t.data_ptr(), t.stride(), t.dtype) for t in state]


@pytest.mark.long
@pytest.mark.parametrize("how", [*MODELS])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_steps_between_exchanges_are_those_of_a_script_alone(
    how: str, options: dict[str, bool]
) -> None:
    """To the bit: other values pass through the model after each step, and its own come back."""
    ends = []
    for is_attached in (False, True):
        model = MODELS[how]()
        vector = ModelVector(model) if is_attached else None
        was = looks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, **options)
        for step in range(STEPS):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if vector is not None:
                vector.gather()
                own = vector.vector.copy()
                vector.vector += 1
                vector.scatter()
                vector.vector[:] = own
                vector.scatter()
        assert looks(model) == was
        ends.append(values_of(model))
    assert ends[0] == ends[1]


def test_a_tied_parameter_is_once_in_the_vector() -> None:
    model = tied()
    vector = ModelVector(model)
    assert len(vector.vector) == 5 * 4 + 4 * 4 + 4
    (entry,) = (e for e in vector.layout.entries if e.aliases)
    assert (entry.name, entry.aliases) == ("embedding.weight", ("head.weight",))
    vector.vector[:] = 2
    vector.scatter()
    assert model.head.weight is model.embedding.weight
    assert (model.head.weight == 2).all()


def test_the_vector_is_in_row_major_order_whatever_the_strides() -> None:
    plain, last = (ModelVector(MODELS[how]()) for how in ("float32", "channels_last"))
    assert np.array_equal(plain.vector, last.vector)
    model = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(torch.arange(6.0).view(3, 2).T)
    turned = ModelVector(model)
    assert turned.vector.tolist() == [0, 2, 4, 1, 3, 5]
    backward_of = (model.weight * torch.tensor([[1.0, 2, 3], [4, 5, 6]])).sum()
    backward_of.backward()
    out = np.empty(6, np.float32)
    assert turned.gather_gradient(out) == pytest.approx(math.sqrt(91))
    assert out.tolist() == [1, 2, 3, 4, 5, 6]
    turned.vector[:] = range(6)
    turned.scatter()
    assert model.weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model.weight.stride() == (1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_vector_keeps_the_digits_that_a_narrow_dtype_rounds(dtype: torch.dtype) -> None:
    """A round in which nothing moves has no displacement; a step is added as the model made it."""
    model = image(dtype=dtype)
    model.head.float()  # A part of it may be float32, and is exact.
    vector = ModelVector(model)
    wanted = vector.vector + np.float32(1e-5)
    vector.vector[:] = wanted
    vector.scatter()
    vector.gather()
    assert np.array_equal(vector.vector, wanted)
    conv = model.conv.weight
    assert torch.equal(conv, torch.tensor(wanted[: conv.numel()]).view(conv.shape).to(dtype))
    with torch.no_grad():
        before = conv.float()
        conv.add_(0.25)
        moved = (conv.float() - before).flatten().numpy()
    vector.gather()
    assert (moved > 0.2).all()
    assert vector.vector[: conv.numel()] == pytest.approx(wanted[: conv.numel()] + moved, abs=1e-7)
    assert np.array_equal(vector.vector[conv.numel() :], wanted[conv.numel() :])
    assert model.conv.weight.dtype is dtype


def test_missing_and_sparse_gradients() -> None:
    model = nn.ModuleDict({"rows": nn.Embedding(4, 2, sparse=True), "unused": nn.Linear(2, 2)})
    vector = ModelVector(model)
    assert not vector.has_gradient()
    model["rows"](torch.tensor([1, 1, 3])).sum().backward()
    out = np.full(len(vector.vector), 9, np.float32)
    assert vector.has_gradient()
    assert vector.gather_gradient(out) == pytest.approx(math.sqrt(10))
    assert out.tolist() == [0, 0, 2, 2, 0, 0, 1, 1, *[0] * 6]


def test_the_norm_tells_of_a_gradient_that_is_not_finite() -> None:
    model = image()
    vector = ModelVector(model)
    backward(model, 0)
    assert math.isfinite(vector.gather_gradient(vector.room()))
    model.head.bias.grad[1] = math.nan
    assert not math.isfinite(vector.gather_gradient(vector.room()))


@pytest.mark.parametrize("how", [*MODELS])
def test_copies_to_and_from_a_device_come_to_the_same(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a GPU, one by one and converted there; only that it is this memory."""

    def one_round() -> tuple[list[bytes], bytes, float]:
        model = MODELS[how]()
        vector = ModelVector(model)
        backward(model, 0)
        out = vector.room()
        norm = vector.gather_gradient(out)
        vector.vector -= out
        vector.scatter()
        return values_of(model), out.tobytes(), norm

    near = one_round()
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(tensor_copies, "is_far", lambda tensor: asked.append(tensor) or True)
    assert one_round() == near
    assert asked


def test_the_vector_begins_with_the_values_at_its_first_use() -> None:
    """What a script does to its model between attaching it and joining the run is in it."""
    model = image()
    vector = ModelVector(model)
    model.requires_grad_(False).apply(lambda each: [p.fill_(7) for p in each.parameters()])
    assert (vector.vector == 7).all()


# ---------------------------------------------------------------- other values for a while


def test_a_model_holds_other_values_for_a_while() -> None:
    model = image(dtype=torch.bfloat16, memory_format=torch.channels_last)
    vector = ModelVector(model)
    with torch.no_grad():  # The steps of a round: what the model has is not in the vector.
        model.conv.weight.add_(0.125)
    was, tensors, in_vector = values_of(model), looks(model), vector.vector.copy()
    others = np.full(len(vector.vector), 0.5, np.float32)
    others.flags.writeable = False
    averaged = vector.averaged() + 3
    with vector.holding(others, averaged):
        assert all((parameter == 0.5).all() for parameter in model.parameters())
        assert np.array_equal(vector.averaged(), averaged)
        assert int(model.norm.num_batches_tracked) == 3
        model.train()
        model(torch.randn(2, 3, 5, 5, dtype=torch.bfloat16))  # It changes the statistics.
    assert values_of(model) == was
    assert looks(model) == tensors
    assert np.array_equal(vector.vector, in_vector)


def test_its_own_values_are_back_after_an_error() -> None:
    model = image()
    vector = ModelVector(model)
    was = values_of(model)
    with (
        pytest.raises(ZeroDivisionError),
        vector.holding(np.zeros_like(vector.vector), vector.averaged() + 1),
    ):
        raise ZeroDivisionError
    assert values_of(model) == was


# ---------------------------------------------------------------- buffers and frozen parameters


def test_buffers_are_averaged_apart_from_the_vector() -> None:
    model = image()
    vector = ModelVector(model)
    model(torch.randn(4, 3, 5, 5))
    averaged = vector.averaged()
    assert averaged.shape == (9,)  # Means, variances and a count.
    other = image()
    ModelVector(other).load_averaged(averaged)
    assert np.array_equal(other.norm.running_var, model.norm.running_var)
    assert int(other.norm.num_batches_tracked) == 1


def frozen_in(first: float) -> tuple[nn.Module, ModelVector]:
    model = image()
    model.conv.requires_grad_(False).bfloat16()
    model.conv.weight.fill_(first)
    return model, ModelVector(model)


def test_frozen_parameters_are_those_of_the_first_worker(tmp_path: Path) -> None:
    """In the file that tasks have, too: this one is written by one worker and read by another."""
    (_, mine), (model, other) = frozen_in(0.5), frozen_in(0.25)
    assert len(mine.vector) == 4 + 4 + 4 * 5 + 5
    first = digests(mine)
    assert first != digests(other)
    assert first == digests(frozen_in(0.5)[1])
    file = run_file(mine.layout, first)
    birth = Register("run", "worker", "worker-0", 1, 7, "here", "0")
    assert not FrozenFile(tmp_path, birth).write(mine, file).error
    reader = FrozenFile(tmp_path, birth)
    reader.digests(other)
    reader.load(other, LoadFrozen(first))
    assert digests(other) == first
    assert (model.conv.weight == 0.5).all()
    other.check()


# ---------------------------------------------------------------- names


def test_names_are_those_of_the_users_model(group_of_one: None) -> None:
    """With torch.compile, of the whole or a part, and with DistributedDataParallel around it."""
    model = image()
    plain = ModelVector(model)
    compiled = torch.compile(model, backend="eager")
    wrapped = nn.parallel.DistributedDataParallel(compiled)
    assert next(iter(wrapped.state_dict())) == "module._orig_mod.conv.weight"
    model.norm = torch.compile(model.norm, backend="eager")
    for each in (model, compiled, wrapped, nn.DataParallel(model)):
        vector = ModelVector(each)
        assert vector.layout == plain.layout
        assert vector.name_of(model.head.bias) == "head.bias"
        vector.check()
        assert np.array_equal(vector.averaged(), plain.averaged())
    plain.check()


def test_a_module_of_the_users_may_be_called_module() -> None:
    vector = ModelVector(nn.ModuleDict({"module": nn.Linear(2, 1)}))
    assert [entry.name for entry in vector.layout.entries] == ["module.weight", "module.bias"]


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone, without threads, which a later fork would lack."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


# ---------------------------------------------------------------- what is refused


def test_a_model_that_fsdp_has_cut_is_refused(group_of_one: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = image()
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    with pytest.raises(DlctlError) as refused:
        ModelVector(model)
    assert '"conv.weight"' in refused.value.message
    assert "FSDP2" in refused.value.message


class FullyShardedDataParallel(nn.Sequential):
    """By its name, the first version of FSDP."""


def with_complex() -> nn.Module:
    model = image()
    model.head.bias = nn.Parameter(torch.zeros(5, dtype=torch.complex64))
    return model


def with_sparse() -> nn.Module:
    model = image()
    model.register_parameter("few", nn.Parameter(torch.eye(3).to_sparse()))
    return model


def with_meta() -> nn.Module:
    model = image()
    model.head.to_empty(device="meta")
    return model


def with_lazy() -> nn.Module:
    model = image()
    model.head = nn.LazyLinear(5)
    return model


def frozen_whole() -> nn.Module:
    return image().requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: FullyShardedDataParallel(image()), "FSDP"),
        (with_complex, "head.bias"),
        (with_sparse, "few"),
        (with_meta, "head.weight"),
        (with_lazy, "head.weight"),
        (frozen_whole, "nothing to train"),
    ],
    ids=["fsdp1", "complex", "sparse", "meta", "lazy", "frozen"],
)
def test_a_model_that_cannot_be_trained_is_refused_by_name(
    make: Callable[[], nn.Module], named: str
) -> None:
    with pytest.raises(DlctlError) as refused:
        ModelVector(make())
    assert named in refused.value.message


# ---------------------------------------------------------------- what must not change


def replaced(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def added(model: nn.Module) -> None:
    model.conv.register_parameter("more", nn.Parameter(torch.zeros(1)))


def added_buffer(model: nn.Module) -> None:
    model.conv.register_buffer("more", torch.zeros(1))


def removed(model: nn.Module) -> None:
    del model.conv


def retyped(model: nn.Module) -> None:
    model.conv.half()


def reshaped(model: nn.Module) -> None:
    model.conv.weight.data = torch.zeros(4, 3, 3, 4)


def thawed(model: nn.Module) -> None:
    model.conv.weight.requires_grad_()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (replaced, "conv.weight"),
        (added, "conv.more"),
        (added_buffer, "conv.more"),
        (removed, "conv."),
        (retyped, "conv."),
        (reshaped, "conv.weight"),
        (thawed, "conv.weight"),
        (lambda model: model.to("meta"), "conv.weight"),
    ],
)
def test_a_change_of_the_model_is_noticed_by_name(
    change: Callable[[nn.Module], None], named: str
) -> None:
    model = image()
    if change is thawed:
        model.conv.requires_grad_(False)
    vector = ModelVector(model)
    vector.check()
    change(model)
    with pytest.raises(DlctlError) as noticed:
        vector.check()
    assert f'"{named}' in noticed.value.message
    assert noticed.value.hint


def test_what_a_script_does_to_its_model_is_no_change() -> None:
    """Training, freezing a part for a while, values in place, other memory, other strides."""
    model = image()
    vector = ModelVector(model)
    backward(model, 0)
    model.eval()
    model.conv.requires_grad_(False)
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    model.to(memory_format=torch.channels_last)
    model.head.weight.data = model.head.weight.data.clone()
    model.norm.running_mean = torch.ones(4)
    model.norm.register_buffer("aside", torch.zeros(2), persistent=False)
    vector.check()
    vector.gather()
    fresh = ModelVector(image()).vector
    assert np.array_equal(vector.vector, fresh + 1)
