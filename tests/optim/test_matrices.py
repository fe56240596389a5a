"""Optimisers of whole matrices: groups, sparse pushes, wrappers, long sides, divergence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from matrix_shards import NAMES, layout, placed, push, shard_of, snapshot

from dlctl.compress.base import Delta
from dlctl.job.config import ParameterGroup
from dlctl.optim.averaged import Averaged
from dlctl.optim.buffered import Buffered
from dlctl.optim.isotropic import isotropic
from dlctl.optim.matrices import kept_of
from dlctl.shards.errors import Diverged
from dlctl.util.names import AVERAGE

EVERY = pytest.mark.parametrize("name", NAMES)


def steps(shard: Any, count: int, seed: int = 0, size: int = 0) -> Any:
    for number in range(count):
        shard.apply(push(seed + number, size), samples=1)
    return shard


@pytest.mark.oracle("sync", "torch.optim.Muon, its products in float32")
def test_muon_is_torch_s(monkeypatch: pytest.MonkeyPatch, agree: Any) -> None:
    """In bfloat16, as torch has it, a direction that the gradient lacks becomes as long as others.
    Tall, wide and square; 35 updates.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.float().clone())
    shapes = {"tall": (9, 4), "wide": (3, 8), "square": (5, 5)}
    of, ends = layout(shapes), np.cumsum([36, 24])
    size = of.size()
    shard = steps(shard_of(placed("muon", of, lr=0.02), size), 35, size=size)
    tensors = [torch.zeros(shape, requires_grad=True) for shape in shapes.values()]
    theirs = torch.optim.Muon(tensors, lr=0.02)
    for number in range(35):
        for tensor, part in zip(tensors, np.split(push(number, size).values, ends), strict=True):
            tensor.grad = torch.from_numpy(part.copy()).view(tensor.shape)
        theirs.step()
    flat = torch.cat([tensor.detach().ravel() for tensor in tensors]).numpy()
    agree(shard.w, flat, atol=1e-5)


@EVERY
def test_a_sparse_push_is_one_with_zeros(name: str) -> None:
    dense, sparse = (steps(shard_of(placed(name)), 3) for _ in range(2))
    where = np.array([1, 5, 17, 22])
    values = np.zeros(dense.size, np.float32)
    values[where] = [0.5, -1.0, 2.0, 0.25]
    dense.apply(Delta(values))
    sparse.apply(Delta(values[where], where))
    assert snapshot(dense) == snapshot(sparse)


@EVERY
def test_groups_have_their_own_rate_and_decay(name: str) -> None:
    """A rate of 0 leaves a matrix where it is, while its state goes on as it would."""
    still = ParameterGroup(match=("a.*",), lr_scale=0.0, weight_decay=0.0)
    grouped = steps(shard_of(placed(name, groups=(still,))), 4)
    plain = steps(shard_of(placed(name)), 4)
    assert not grouped.w[:20].any()
    assert grouped.w[20:].tobytes() == plain.w[20:].tobytes()
    first = next(iter(plain.slots))
    assert grouped.slots[first].tobytes() == plain.slots[first].tobytes()


@EVERY
def test_a_part_of_the_model_is_stepped_as_within_the_whole(name: str) -> None:
    size = layout().size()
    whole = steps(shard_of(placed(name)), 5)
    for lo, hi in ((0, 16), (16, 18), (18, size)):
        optimizer = placed(name, lo=lo, hi=hi)
        part = shard_of(optimizer, hi - lo)
        for number in range(5):
            part.apply(Delta(push(number).values[lo:hi]))
        assert part.w.tobytes() == whole.w[lo:hi].tobytes()
        for kind, cut in kept_of(optimizer).items():
            there = whole.storage.kept[kind][cut.lo : cut.hi]
            assert part.storage.kept[kind].tobytes() == there.tobytes()


@EVERY
def test_a_buffer_and_an_average_work_around_it(name: str) -> None:
    buffered = shard_of(Averaged(Buffered(placed(name), 2), 0.5))
    plain = shard_of(placed(name))
    average = np.zeros(plain.size, np.float32)
    for number in range(4):
        one, two = push(2 * number), push(2 * number + 1)
        buffered.apply(one)
        average += np.float32(0.5) * (plain.w - average)
        buffered.apply(two)
        plain.apply(Delta((one.values + two.values) * np.float32(0.5)))
        average += np.float32(0.5) * (plain.w - average)
    np.testing.assert_allclose(buffered.w, plain.w, atol=1e-6)
    np.testing.assert_allclose(buffered.slots[AVERAGE], average, atol=1e-6)


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_a_side_that_is_too_long_keeps_the_identity_and_says_so(name: str) -> None:
    optimizer = placed(name, max_dim=3)
    assert {kind: cut.size for kind, cut in kept_of(optimizer).items()} != {}
    assert not optimizer.is_whole(layout().entries[0]), "both sides of 4 are longer than 3"
    wide = layout({"embedding": (3, 40), "b": (3,)})
    optimizer = placed(name, wide, max_dim=10)
    (remark,) = optimizer.remarks()
    assert "embedding" in remark
    assert "40" in remark
    assert all(cut.size == 9 for cut in kept_of(optimizer).values()), "of the side of 3 alone"
    shard = steps(shard_of(optimizer, wide.size()), 3, size=wide.size())
    assert np.abs(shard.w).min() > 0
    assert not placed(name).remarks()


@pytest.mark.parametrize("name", ["soap", "shampoo", "isotropic"])
def test_a_matrix_with_two_long_sides_is_stepped_as_all_else_and_says_so(name: str) -> None:
    of = layout({"large": (6, 5), "b": (3,)})
    optimizer = placed(name, of, max_dim=4)
    assert not optimizer.is_whole(of.entries[0])
    (remark,) = optimizer.remarks()
    assert "large" in remark
    assert not placed(name, of, max_dim=4, elementwise=["large"]).remarks(), "as it was told"
    shard = steps(shard_of(optimizer, of.size()), 3, size=of.size())
    assert np.abs(shard.w).min() > 0


def test_a_kernel_is_a_matrix_of_its_first_dimension_and_all_others_for_lmo() -> None:
    of, flat = layout({"kernel": (3, 2, 4)}), layout({"kernel": (3, 8)})
    both = [steps(shard_of(placed("lmo", each), 24), 4, size=24) for each in (of, flat)]
    assert both[0].w.tobytes() == both[1].w.tobytes()
    assert not placed("muon", of).is_whole(of.entries[0])


def test_directions_that_a_mean_lacks_stay_out_of_the_isotropic_one() -> None:
    one = np.outer([1.0, 2.0, 2.0], [3.0, 0.0, 4.0, 0.0]).astype(np.float32)
    np.testing.assert_allclose(isotropic(one), one / 3, rtol=1e-6)
    assert not isotropic(np.zeros((2, 3), np.float32)).any()


def test_patterns_leave_matrices_to_adamw() -> None:
    optimizer = placed("muon", elementwise=["*"])
    assert not optimizer.is_whole(layout().entries[0])
    shard = steps(shard_of(optimizer), 3)
    assert 0 < np.abs(shard.w).max() < 3.1 * 0.02 * 0.05, "three steps of AdamW's rate at most"


@pytest.mark.parametrize("name", ["muon", "soap", "shampoo", "lmo"])
@pytest.mark.parametrize("size", [1e24, 1e37])
def test_a_matrix_that_diverges_is_an_error_of_the_run(name: str, size: float) -> None:
    """Not one of a decomposition that does not converge."""
    shard = shard_of(placed(name))
    with pytest.raises(Diverged):
        steps_along(shard, size)


def steps_along(shard: Any, size: float) -> None:
    for number in range(3):
        shard.apply(Delta(push(number).values * np.float32(size)))
