"""A sum before an optimiser: the step is that of the mean by samples, and a journal replays it."""

from __future__ import annotations

import numpy as np

from dlctl.compress.base import Delta
from dlctl.optim.gathered import FOLDS, GATHERED, TAKES, Gathered
from dlctl.optim.momentum import Momentum, MomentumOptions
from dlctl.shards.memory import in_memory

RNG = np.random.default_rng(5)
ZEROS = np.zeros(6, np.float32)


def momentum() -> Momentum:
    return Momentum(MomentumOptions(lr=0.1, momentum=0.9))


def test_what_is_gathered_makes_one_step_of_the_mean_by_samples():
    shard, plain = in_memory(Gathered(momentum()), ZEROS), in_memory(momentum(), ZEROS)
    for counts in ([3, 1, 4], [2]):
        gradients = [RNG.standard_normal(6).astype(np.float32) for _ in counts]
        before = shard.w.copy()
        for n, g in zip(counts, gradients, strict=True):
            shard.apply(Delta(g), n, counters={TAKES: n})
        assert np.array_equal(shard.w, before)
        assert shard.optimizer.counters[GATHERED] == sum(counts)
        shard.apply(Delta(ZEROS), counters={FOLDS: 1})
        mean = sum(n * g for n, g in zip(counts, gradients, strict=True)) / sum(counts)
        plain.apply(Delta(mean.astype(np.float32)), sum(counts))
        np.testing.assert_allclose(shard.w, plain.w, rtol=1e-5)
    assert shard.samples == plain.samples == 10


def test_an_update_of_neither_kind_is_one_of_the_optimiser_and_keeps_the_sum():
    shard, plain = in_memory(Gathered(momentum()), ZEROS), in_memory(momentum(), ZEROS)
    g = RNG.standard_normal(6).astype(np.float32)
    shard.apply(Delta(g), 2, counters={TAKES: 2})
    shard.apply(Delta(g), 1)
    plain.apply(Delta(g), 1)
    assert np.array_equal(shard.w, plain.w)
    assert shard.optimizer.counters[GATHERED] == 2
