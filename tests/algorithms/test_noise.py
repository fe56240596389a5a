"""The gradient noise scale: of gradients whose noise is known, and however they are cut."""

from __future__ import annotations

import numpy as np
import pytest

from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.holding import NOISE_EVERY
from dlctl.algorithms.methods.sync import Options
from dlctl.algorithms.noise import NoiseScale, noise_scale
from dlctl.compress.base import Delta
from dlctl.optim.sgd import SGD, SGDOptions
from dlctl.shards.memory import in_memory
from dlctl.wire.messages import Packed, Push

SIZE, SIGMA, SAMPLES = 600, 0.3, (16, 32, 8, 64)
"""Elements; of the noise of one sample's gradient, in each element; of each worker's batch."""
GRADIENT = np.linspace(0.05, 0.15, SIZE)
SCALE = SIZE * SIGMA**2 / float(GRADIENT @ GRADIENT)


def steps(count: int) -> list[list[np.ndarray]]:
    """Of each step the gradients of all workers."""
    rng = np.random.default_rng(7)
    return [
        [(GRADIENT + SIGMA / n**0.5 * rng.standard_normal(SIZE)).astype("f4") for n in SAMPLES]
        for _ in range(count)
    ]


def found(cuts: tuple[int, ...]) -> float:
    """By shards that begin there, together."""
    shards = [NoiseScale() for _ in range(len(cuts) + 1)]
    for gradients in steps(300):
        parts = zip(*(np.split(gradient, cuts) for gradient in gradients), strict=True)
        for shard, own in zip(shards, parts, strict=True):
            mean = np.average(np.array(own, np.float64), axis=0, weights=SAMPLES)
            squares = sum(float(g.astype("f8") @ g) for g in own)
            shard.add(squares, float(mean @ mean), SAMPLES)
    known = [parts for shard in shards if (parts := shard.parts()) is not None]
    assert len(known) == len(shards)
    scale = noise_scale(known)
    assert scale is not None
    return scale


def test_it_is_found_from_what_shards_see_of_unequal_batches() -> None:
    assert found(()) == pytest.approx(SCALE, rel=0.1)
    assert found((200, 450)) == pytest.approx(found(()), rel=1e-9)


def test_a_barrier_looks_at_some_steps_of_two_workers_and_more() -> None:
    barrier = Barrier(Options(), in_memory(SGD(SGDOptions(lr=0.0)), np.zeros(SIZE, np.float32)))
    barrier.measures_noise = True
    barrier.members(frozenset(range(len(SAMPLES))))
    for clock, gradients in enumerate(steps(60 * NOISE_EVERY)):
        for slot, gradient in enumerate(gradients):
            packed = Packed("none", SIZE, (gradient,))
            push = Push(slot, 1, 1, clock, clock, clock, clock, SAMPLES[slot], clock, packed, 0)
            barrier.push(push, Delta(gradient))
    (parts,) = barrier.figures().values()
    assert noise_scale([tuple(parts)]) == pytest.approx(SCALE, rel=0.1)


def test_one_worker_tells_nothing_and_pure_noise_no_scale() -> None:
    alone = NoiseScale()
    alone.add(4.0, 4.0, [8])
    assert alone.parts() is None
    assert noise_scale([]) is None
    assert noise_scale([(3.0, -0.1)]) is None
