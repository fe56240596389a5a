"""Groups of parameters on a shard: each is what its optimiser makes of its elements alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from kept_states import dense, snapshot, sparse
from update_loops import loops as loops

from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.job.config import ParameterGroup
from dlctl.model.parameter_groups import GroupRun
from dlctl.optim import grouped
from dlctl.optim.buffered import Buffered
from dlctl.shards.base import Shard, Spec
from dlctl.shards.image import ImageForm
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.shards.memory import InMemory
from dlctl.sim.states import MemoryLog
from dlctl.util.threads import BLOCK, PLACES

NAMES = registry.names("optimizers")
SIZE = 2 * BLOCK + 17
GROUPS = (
    ParameterGroup(match=("*",), weight_decay=0.0),
    ParameterGroup(match=("*",), weight_decay=0.5, lr_scale=0.3),
    ParameterGroup(match=("*",), lr_scale=0.0),
)
RUNS = [
    GroupRun(3, -1), GroupRun(10, 0), GroupRun(11, 1), GroupRun(PLACES, 2),
    GroupRun(BLOCK - 1, 1), GroupRun(BLOCK + 9, -1),
    *(GroupRun(BLOCK + 9 + 100 * number, number % 4 - 1) for number in range(1, 31)),
    GroupRun(BLOCK + 5000, 0), GroupRun(2 * BLOCK, 1), GroupRun(SIZE, -1),
]  # fmt: skip
"""Some blocks have few pieces, and some have many."""
UPDATES = [
    dense(1, SIZE), sparse(2, SIZE, 900), sparse(3, SIZE, 1), sparse(4, SIZE, SIZE // 3),
    sparse(5, SIZE, 0), sparse(6, SIZE, 12_000), dense(7, SIZE), dense(8, SIZE),
]  # fmt: skip
"""More than one block of places, and more than the undo record takes."""


def options_of(name: str) -> dict[str, Any]:
    kind = registry.load("optimizers", name)
    has_decay = "weight_decay" in kind.Options.__dataclass_fields__
    given = {"lr": 0.05, "weight_decay": 0.1} if has_decay else {"lr": 0.05}
    return dataclasses.asdict(kind.Options(**given))


def optimizer_of(name: str, runs: list[GroupRun] = RUNS) -> Any:
    kind = registry.load("optimizers", name)
    return grouped.make(kind, options_of(name), GROUPS, runs)


def alone(name: str, group: int) -> tuple[Any, np.ndarray]:
    """The optimiser of a group, and the elements that it is for."""
    kind, options = registry.load("optimizers", name), options_of(name)
    if group >= 0:
        options["lr"] *= GROUPS[group].lr_scale
        if GROUPS[group].weight_decay is not None and "weight_decay" in options:
            options["weight_decay"] = GROUPS[group].weight_decay
    scale, optimizer = options.pop("lr"), kind(kind.Options(**{**options, "lr": 1.0}))
    optimizer.lr = scale  # 0, too.
    begins = [0, *(run.end for run in RUNS[:-1])]
    both = zip(begins, RUNS, strict=True)
    mine = [np.arange(lo, run.end) for lo, run in both if run.group == group]
    return optimizer, np.concatenate(mine)


def cut(delta: Delta, elements: np.ndarray) -> Delta:
    if delta.indices is None:
        return Delta(delta.values[elements])
    is_mine = np.isin(delta.indices, elements)
    return Delta(delta.values[is_mine], np.searchsorted(elements, delta.indices[is_mine]))


class OnMapped:
    def __init__(self, spec: Spec) -> None:
        self.spec, self.buffer = spec, bytearray(ImageForm.of(spec, "boot").total_bytes)

    def create(self) -> Any:
        return Mapped.create(self.buffer, self.spec, "boot")

    def reopen(self) -> Any:
        return Mapped.reopen(self.buffer, self.spec, "boot")


class OnJournal:
    def __init__(self, spec: Spec) -> None:
        self.spec, self.log = spec, MemoryLog()

    def create(self) -> Any:
        return Journaled.create(self.log, self.spec)

    def reopen(self) -> Any:
        return Journaled(self.log, self.spec)


START = np.linspace(-1, 1, SIZE, dtype=np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_every_group_is_its_optimiser_alone_on_every_storage_over_restarts(name: str) -> None:
    spec = Spec("run", 0, 0, SIZE, optimizer_of(name).slots)
    places = [OnMapped(spec), OnJournal(spec)]
    shards = [Shard(optimizer_of(name), place.create()) for place in places]
    for shard in shards:
        shard.storage.fill({"w": START}, None)
        shard.commit({})
    groups = []
    for number in (-1, 0, 1, 2):
        optimizer, elements = alone(name, number)
        mine = Shard(
            optimizer, InMemory().create(Spec("run", 0, 0, elements.size, optimizer.slots))
        )
        mine.storage.fill({"w": START[elements]}, None)
        groups.append((mine, elements))
    for number, delta in enumerate(UPDATES):
        for mine, elements in groups:
            mine.apply(cut(delta, elements))
        for shard in shards:
            shard.apply(delta)
            shard.commit({"number": number})
        if number % 3 == 2:
            shards = [Shard(optimizer_of(name), place.reopen()) for place in places]
            assert [shard.resume() for shard in shards] == [{"number": number}] * 2
        for shard in shards:
            for mine, elements in groups:
                assert np.array_equal(shard.w[elements], mine.w), number
                for slot, values in mine.slots.items():
                    assert np.array_equal(shard.slots[slot][elements], values), (slot, number)
            assert dict(shard.optimizer.counters) == dict(groups[0][0].optimizer.counters)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_an_update_that_is_begun_while_it_comes_has_the_rates_of_its_groups(name: str) -> None:
    spec = Spec("run", 0, 0, SIZE, optimizer_of(name).slots)
    plain = Shard(optimizer_of(name), InMemory().create(spec))
    shard = Shard(optimizer_of(name), OnMapped(spec).create())
    for each in (plain, shard):
        each.storage.fill({"w": START}, None)
        each.commit({})
    for seed in range(3):
        values = dense(seed, SIZE).values
        begun = [shard.prepare(values, n, is_new=n == 500) for n in (500, BLOCK + 3)]
        assert all(begun)
        if seed == 1:  # What was begun has another rate.
            shard.lr = plain.lr = 0.01
        for each in (plain, shard):
            each.apply(Delta(values))
            each.commit({})
        assert snapshot(shard) == snapshot(plain)


def test_a_buffer_before_it_leaves_the_groups_what_they_are() -> None:
    optimizers = (optimizer_of("adamw"), Buffered(optimizer_of("adamw"), 2))
    plain, shard = (
        Shard(each, InMemory().create(Spec("run", 0, 0, SIZE, each.slots))) for each in optimizers
    )
    one, other = UPDATES[1], UPDATES[0]
    both = other.values.copy()
    both[one.indices] += one.values
    plain.apply(Delta(both * np.float32(0.5)))
    for delta in (other, one):
        shard.apply(delta)
    assert np.array_equal(shard.w, plain.w)


def test_the_rate_is_told_as_it_was_set() -> None:
    optimizer = optimizer_of("adamw")
    assert optimizer.lr == 0.05
    optimizer.lr = 0.2
    assert optimizer.lr == 0.2


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (ParameterGroup(match=("*",)),),
        (ParameterGroup(match=("*",), weight_decay=0.1, lr_scale=1.0),),
    ],
)
def test_groups_that_change_nothing_cost_nothing(groups: tuple[ParameterGroup, ...]) -> None:
    kind = registry.load("optimizers", "adamw")
    runs = [GroupRun(SIZE // 2, -1), GroupRun(SIZE, len(groups) - 1)]
    assert type(grouped.make(kind, options_of("adamw"), groups, runs)) is kind
