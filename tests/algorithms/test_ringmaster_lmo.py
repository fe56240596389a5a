"""Ringmaster LMO against a loop of its own in torch: delays, drops, steps; on several servers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SHARD_TERM
from matrix_formulas import ByFormula
from matrix_shards import shard_of

from dlctl import registry
from dlctl.algorithms.methods.ringmaster_lmo import Options, Replica, Server, delay_max
from dlctl.compress.base import Delta
from dlctl.model.cut import cut, units
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.optim import on_shard
from dlctl.wire.messages import APPLIED, LATE, Packed, Push

SHAPES = [(6, 3), (5,), (3, 7), (4, 4), (2,)]
LAYOUT = Layout(
    tuple(TensorEntry(f"{n}", TRAINED, shape, "float32") for n, shape in enumerate(SHAPES))
)
LR = 0.05


def servers(count: int, options: Options) -> tuple[list[Server], list[int]]:
    """The shard sides, and the bounds of their shards."""
    kind = registry.load("optimizers", "lmo")
    whole = kind(kind.Options())
    bounds = cut(units(LAYOUT, whole.is_whole), [1.0] * count)
    sides = []
    for lo, hi in pairwise(bounds):
        optimizer = on_shard.make(kind, {"lr": LR}, (), LAYOUT, lo, hi)
        rule = Server.optimizer(options, optimizer, 4)
        shard = shard_of(rule, hi - lo)
        shard.w[:] = 1
        sides.append(Server(options, shard))
    return sides, [*bounds]


def push(base: int, gradient: np.ndarray) -> tuple[Push, Delta]:
    packed = Packed("none", gradient.size, (gradient,))
    return Push(0, 1, SHARD_TERM, 0, base, 0, 0, 8, 0, packed, 0), Delta(gradient)


@pytest.mark.oracle("ringmaster-lmo", "its rule in torch, float64")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("free", [False, True], ids=["R=3", "parameter-free"])
def test_it_is_the_authors_rule(count: int, free: bool, agree: Any) -> None:
    options = Options(delay_max=3, parameter_free=free)
    sides, bounds = servers(count, options)
    rng = np.random.default_rng(count)
    theirs = ByFormula("lmo", {"momentum": 0.95, "lr": LR, "parameter_free": free}, SHAPES, LR)
    x, k, dropped = torch.ones(LAYOUT.size(), dtype=torch.float64), 0, 0
    for _ in range(60):
        base = int(rng.integers(max(0, k - 6), k + 1))
        gradient = rng.standard_normal(LAYOUT.size()).astype(np.float32)
        most = max(1, math.floor(math.sqrt(k))) if free else 3
        is_used = k - base < most
        for side, (lo, hi) in zip(sides, pairwise(bounds), strict=True):
            (outcome,) = side.push(*push(base, gradient[lo:hi]))
            assert (outcome.kind, outcome.staleness) == (APPLIED if is_used else LATE, k - base)
        if is_used:
            x, k = theirs.step(x, torch.from_numpy(gradient.astype(np.float64))), k + 1
        dropped += not is_used
        assert {side.shard.version for side in sides} == {k}
    agree(np.concatenate([side.shard.w for side in sides]), x.numpy(), atol=1e-5)
    assert dropped
    assert k > 20


@pytest.mark.parametrize("version", [0, 1, 3, 4, 50, 99, 1000])
def test_a_replica_knows_from_which_update_on_its_gradient_is_too_old(version: int) -> None:
    """R grows with the updates that are made meanwhile."""
    side = Replica.__new__(Replica)
    side.options = Options(parameter_free=True)
    delay = side.delay_max(version)
    assert [d < delay_max(version + d) for d in range(delay + 1)] == [True] * delay + [False]
    side.options = Options(delay_max=3)
    assert side.delay_max(version) == 3
