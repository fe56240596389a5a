"""Ringmaster ASGD against its rule: how old a gradient may be."""

from __future__ import annotations

import numpy as np
import pytest
from by_hand import SHARD_TERM

from dlctl.algorithms.methods.ringmaster import Options, Server
from dlctl.compress.base import Delta
from dlctl.optim.sgd import SGD, SGDOptions
from dlctl.shards.memory import in_memory
from dlctl.wire.messages import APPLIED, LATE, Packed, Push

SIZE, LR = 4, 0.1


@pytest.mark.oracle("ringmaster", "the rule of Maranjyan 2025 in float64")
@pytest.mark.parametrize("delay_max", [1, 2, 5])
def test_it_is_the_paper_s_rule(delay_max, agree):
    shard = in_memory(SGD(SGDOptions(lr=LR)), np.ones(SIZE, np.float32))
    side, rng = Server(Options(delay_max=delay_max), shard), np.random.default_rng(delay_max)
    x, k, dropped = np.ones(SIZE), 0, 0
    for _ in range(50):
        base = int(rng.integers(max(0, k - 6), k + 1))
        gradient = rng.standard_normal(SIZE).astype(np.float32)
        packed = Packed("none", SIZE, (gradient,))
        message = Push(0, 1, SHARD_TERM, 0, base, 0, 0, 8, 0, packed, 0)
        (outcome,) = side.push(message, Delta(gradient))
        is_used = k - base < delay_max
        assert (outcome.kind, outcome.staleness) == (APPLIED if is_used else LATE, k - base)
        if is_used:
            x, k = x - LR * gradient, k + 1
        dropped += not is_used
        assert shard.version == k
    agree(shard.w, x, rtol=1e-5, atol=1e-6)
    assert dropped
