"""The hooks of all-reduce: what is summed instead of gradients, next to torch's and to loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from by_hand import Player, Shards
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as of_torch

from dlctl.algorithms.methods.allreduce import ALLREDUCE, Options
from dlctl.algorithms.methods.powersgd import PowerSgd
from dlctl.algorithms.needs import NextBatch, Step
from dlctl.model.flat import TRAINED, Layout, TensorEntry

SIZE, LR = 8, 0.1
SHAPES = ((24, 30), (30,), (16, 4, 5), (2, 3))
"""The last one would not become smaller."""
LAYOUT = Layout(
    tuple(TensorEntry(f"p{n}", TRAINED, shape, "float32") for n, shape in enumerate(SHAPES))
)
TOTAL = LAYOUT.size()


def drawn(*seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(TOTAL).astype(np.float32)


class Bucket:
    """What torch's hook asks of a bucket of gradients."""

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector = vector

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._vector

    def gradients(self) -> list[torch.Tensor]:
        return [self._vector[lo:hi].view(entry.shape) for entry, lo, hi in LAYOUT.slices(TRAINED)]


KEPT: list[Any] = []
"""Groups that have been destroyed. A thread of gloo may still end the last future of torch's hook;
if it dropped the last reference to its own group, the process would abort.
"""


@pytest.fixture
def alone():
    """A group of this process, as torch's hook needs one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    KEPT.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.oracle("allreduce", "powersgd: torch's hook of DistributedDataParallel")
@pytest.mark.parametrize("rank", [1, 3])
def test_low_rank_sums_are_those_of_torch_step_by_step(rank, alone, agree):
    """With its error feedback and its warm start, of one replica."""
    ours = PowerSgd(LAYOUT, rank)
    state = of_torch.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, orthogonalization_epsilon=0
    )
    for step in range(6):
        gradient = drawn(step)
        found = of_torch.powerSGD_hook(state, Bucket(torch.from_numpy(gradient.copy())))
        theirs = found.wait()[0] if isinstance(found.wait(), list) else found.wait()
        if step < 2:
            assert np.array_equal(theirs.numpy(), gradient)
            continue
        if (
            step == 2
        ):  # Both begin with random numbers, so the next step has the same to begin with.
            ours.q = state.q_memory_dict[0].numpy().copy()
            ours.error = state.error_dict[0].numpy().copy()
            continue
        mean = ours.second(ours.first(gradient))
        agree(ours.commit(mean, is_counted=True), theirs.numpy(), atol=1e-4)
        agree(ours.error, state.error_dict[0].numpy(), atol=1e-4)


@pytest.mark.oracle("allreduce", "powersgd: a loop of the paper, two replicas")
def test_two_replicas_make_one_low_rank_mean_and_keep_errors_of_their_own(agree):
    both = [PowerSgd(LAYOUT, 2), PowerSgd(LAYOUT, 2)]
    q, errors = both[0].q[: 30 * 2].reshape(30, 2).astype(float), np.zeros((2, 24, 30))
    for step in range(4):
        gradients = [drawn(slot, step) for slot in range(2)]
        first = sum(p.first(g) for p, g in zip(both, gradients, strict=True)) / 2
        second = sum(p.second(first) for p in both) / 2
        found = [p.commit(second, is_counted=True) for p in both]
        assert np.array_equal(*found)
        matrices = [
            g[: 24 * 30].reshape(24, 30) + e for g, e in zip(gradients, errors, strict=True)
        ]
        p = np.linalg.qr(sum(matrices) @ np.linalg.qr(q)[0])[0]
        q = sum(matrix.T @ p for matrix in matrices) / 2
        errors = [matrix - p @ p.T @ matrix for matrix in matrices]
        agree(found[0][: 24 * 30], (p @ q.T).ravel(), atol=1e-4)
        agree(both[1].error[: 24 * 30], errors[1].ravel(), atol=1e-4)
        agree(
            found[1][24 * 30 : 24 * 30 + 30], (gradients[0] + gradients[1])[720:750] / 2, atol=1e-6
        )


def test_after_a_replica_has_died_the_other_one_steps_along_its_own_gradients():
    """Each replica's gradients have a mean of their own. An error against the common mean would
    accumulate the difference, and be taken for a gradient when nothing cancels it any more.
    """
    both = [PowerSgd(LAYOUT, 1), PowerSgd(LAYOUT, 1)]
    common, apart = drawn(100), drawn(101)
    for step in range(200):
        gradients = [common + apart + drawn(0, step), common - apart + drawn(1, step)]
        first = sum(p.first(g) for p, g in zip(both, gradients, strict=True)) / 2
        second = sum(p.second(first) for p in both) / 2
        for replica in both:
            replica.commit(second, is_counted=True)
    left, steps = both[0], []
    for step in range(200, 400):
        gradient = common + apart + drawn(0, step)
        steps += [left.commit(left.second(left.first(gradient)), is_counted=True)]
    off = [np.linalg.norm(np.mean(few, 0) - common - apart) for few in (steps[:20], steps[-20:])]
    assert off[0] < 2 * off[1]


def gradient_of(w: np.ndarray[Any, Any], batch: list[int]) -> Step:
    """Of |w - x|^2 / 2, where x is the batch's own."""
    x = np.random.default_rng(batch).standard_normal(SIZE)
    return Step((w - x).astype(np.float32), 1, 1.0)


def both_after(steps: int, **options: Any) -> list[Player]:
    shards = Shards(ALLREDUCE, np.zeros(SIZE, np.float32), 0)
    shards.slots = frozenset(range(2))
    both = [
        Player(ALLREDUCE, shards, gradient_of, slot, own_lr=LR, options=Options(**options))
        for slot in range(2)
    ]
    for number in range(steps):
        for player in both:
            player.todo += [(NextBatch(0, number, True), [player.slot, number])]
    for _ in range(4 * steps):
        for player in both:
            player.advance()
    assert not any(player.todo for player in both)
    return both


@pytest.mark.oracle("allreduce", "post-local-sgd: a loop of the paper, two replicas")
def test_after_steps_of_all_replicas_step_by_themselves_between_two_means(agree):
    both = both_after(11, hook="post-local-sgd", local_after_steps=2, local_steps=3)
    w = np.ones((2, SIZE))
    for number in range(11):
        x = [np.random.default_rng([slot, number]).standard_normal(SIZE) for slot in range(2)]
        gradients = w - np.array(x)
        w -= LR * (gradients if number >= 2 else gradients.mean(0))
        if number >= 2 and (number - 1) % 3 == 0:
            w[:] = w.mean(0)
    for player, own in zip(both, w, strict=True):
        agree(player.parameters, own, atol=1e-6)


@pytest.mark.oracle("allreduce", "fp16, bf16: whole gradients")
@pytest.mark.parametrize(("hook", "part"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_in_half_the_bits_each_step_is_as_far_off_as_they_round(hook, part, agree):
    """Two roundings of each gradient, one of the mean."""
    halves, whole = both_after(1, hook=hook), both_after(1)
    for half, exact in zip(halves, whole, strict=True):
        assert not np.array_equal(half.parameters, exact.parameters)
        agree(half.parameters, exact.parameters, atol=LR * 3 * part * 3)
