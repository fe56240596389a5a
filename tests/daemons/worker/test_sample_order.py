"""A task may choose the samples of an epoch, and their order; all workers have the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stepping import batch_of
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset, WeightedRandomSampler

from daemons.worker.data.portion_loader import PortionLoader
from daemons.worker.data.sample_order import SampleOrder, chosen_by
from daemons.worker.task.user_task import Task, TaskError


def task(**parts: Any) -> Task:
    user = SimpleNamespace(model=nn.Module, dataset=list, loss=lambda model, batch: None, **parts)
    return Task(user)


def order(size: int = 10, seed: int = 5, **parts: Any) -> SampleOrder:
    dataset = range(size)
    return SampleOrder(size, seed=seed, shuffle=True, draw=chosen_by(task(**parts), dataset, seed))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return count()


def test_portions_are_ranges_of_the_order_that_the_task_s_sampler_returns():
    def sampler(dataset: Any, epoch: int) -> list[int]:
        return [row for row in range(len(dataset)) if row % 3 != epoch % 3][:6]

    draw = chosen_by(task(sampler=sampler), range(10), 5)
    data = PortionLoader(range(10), batch_size=2, seed=5, shuffle=True, processes=0, draw=draw)
    assert data.order.length == 6
    assert batch_of(data, 0, 0, 6, 1).tolist() == [4, 5]
    assert batch_of(data, 1, 2, 6, 0).tolist() == [3, 5]
    assert batch_of(data, 0, 0, 6, 2).tolist() == [7, 8], "epochs may take turns"


SAMPLERS: list[Callable[[Any, int], Any]] = [
    lambda dataset, epoch: torch.randperm(len(dataset)),
    lambda dataset, epoch: np.random.permutation(len(dataset)),
    lambda dataset, epoch: random.sample(range(len(dataset)), len(dataset)),
    lambda dataset, epoch: WeightedRandomSampler([1.0] * len(dataset), len(dataset)),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["torch", "numpy", "random", "a Sampler"])
def test_what_a_sampler_draws_is_the_same_in_all_workers_and_not_the_replica_s(sampler):
    def drawn() -> list[float]:
        return [float(torch.rand(())), float(np.random.random()), random.random()]

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    one = order(sampler=sampler)
    rows = [one.rows(epoch, 0, 10).tolist() for epoch in (0, 1)]
    assert drawn() == expected, "the replica's own draws are as they were"
    other = order(sampler=sampler)  # Its generators are somewhere else now.
    assert [other.rows(epoch, 0, 10).tolist() for epoch in (0, 1)] == rows
    assert other.digest == one.digest
    assert rows[0] != rows[1]
    assert order(sampler=sampler, seed=6).rows(0, 0, 10).tolist() != rows[0]


def test_weights_draw_with_replacement_by_the_seed_and_the_epoch():
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0] * 1000)
    one = order(4000, sample_weights=lambda dataset: weights)
    rows = one.rows(0, 0, 4000)
    found = Counter((rows % 4).tolist())
    assert one.length == 4000
    assert set(found) == {1, 2}, "what has the weight 0 never comes"
    assert abs(found[2] / 4000 - 0.75) < 0.03
    assert len(set(rows.tolist())) < 2000, "some come more than once"
    again = order(4000, sample_weights=lambda dataset: weights)
    assert np.array_equal(again.rows(0, 1000, 2000), rows[1000:2000])
    assert not np.array_equal(one.rows(1, 0, 4000), rows)
    assert again.digest == one.digest
    assert order(4000, sample_weights=lambda dataset: weights + 1).digest != one.digest


def wrong(what: str, value: Any) -> TaskError:
    with pytest.raises(TaskError) as caught:
        order(4, **{what: lambda *_: value})
    return caught.value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "task.sampler raised TypeError: 'int' object is not iterable"),
        ([], "task.sampler returned a value of type list, not the numbers of samples"),
        ([0.5, 1.0], "task.sampler returned a value of type list, not the numbers of samples"),
        (torch.ones(2, 2), "returned a float32 tensor of shape [2, 2], not the numbers of samples"),
        ([0, 4], "task.sampler returned the number 4; the dataset has 4 samples"),
        (torch.tensor([0, -1]), "task.sampler returned the number -1; the dataset has 4 samples"),
    ],
)
def test_an_order_that_is_none_is_said_with_the_line_of_the_sampler(value, message):
    error = wrong("sampler", value)
    assert message in error.message
    assert __file__ in (error.where or "")


@pytest.mark.parametrize("is_returned", [False, True])
def test_the_samples_of_one_process_among_several_are_refused_as_an_order(is_returned):
    sampler = DistributedSampler(range(4), num_replicas=2, rank=0)
    with pytest.raises(TaskError) as caught:
        order(4, sampler=(lambda *_: sampler) if is_returned else sampler)
    error = caught.value
    assert "2" in error.message
    assert "RandomSampler" in (error.hint or "")
    alone = DistributedSampler(range(4), num_replicas=1, rank=0)
    assert sorted(order(sampler=alone).rows(0, 0, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "value",
    [
        [1, 1],
        [1, 1, -0.5, 1],
        [1, float("nan"), 1, 1],
        [0, 0, 0, 0],
        [1, float("inf"), 1, 1],
        "abcd",
    ],
)
def test_weights_that_are_none_are_said_with_the_line_of_the_task(value):
    error = wrong("sample_weights", value)
    assert " 4 " in error.message
    assert __file__ in (error.where or "")


def test_every_epoch_has_as_many_samples():
    chosen = order(sampler=lambda dataset, epoch: range(5 + epoch))
    with pytest.raises(TaskError, match=r"6 .* epoch 1\b.* 5 .*epoch 0"):
        chosen.rows(1, 0, 5)


def test_a_task_has_a_sampler_or_weights():
    with pytest.raises(TaskError, match=r"sampler\(\).*sample_weights\(\)"):
        order(sampler=lambda dataset, epoch: [0], sample_weights=lambda dataset: [1] * 10)


def test_a_stream_has_an_order_of_its_own():
    chosen = task(sample_weights=lambda dataset: [1.0])
    with pytest.raises(TaskError, match=r"sample_weights\(\)"):
        chosen_by(chosen, Endless(), 5)
