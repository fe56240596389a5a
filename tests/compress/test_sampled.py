"""The threshold of a sample selects the largest elements, in one pass once it is known."""

import numpy as np
import pytest

from dlctl.compress.magnitudes import Magnitudes
from dlctl.compress.sampled import PASSES_MAX, SampledTopK
from dlctl.model.vector import largest

D = 40_000
SHAPES = {
    "normal": lambda rng: rng.standard_normal(D),
    "uniform": lambda rng: rng.uniform(-1, 1, D),
    "heavy-tailed": lambda rng: rng.standard_cauchy(D),
    "laplace": lambda rng: rng.laplace(size=D),
    "layers of different scales": lambda rng: (
        rng.standard_normal(D) * np.repeat([1e-4, 1, 30], D)[np.arange(0, 3 * D, 3)]
    ),
    "constant": lambda rng: np.full(D, -0.25),
    "three values": lambda rng: rng.integers(-1, 2, D) * 0.5,
    "almost all zero": lambda rng: np.where(rng.random(D) < 1e-4, 1.0, 0.0) * rng.random(D),
    "one large": lambda rng: np.eye(1, D, 5)[0] * 100 + 0.01 * rng.random(D),
    "all zero": lambda rng: np.zeros(D),
}


def sampled(density):
    return SampledTopK(SampledTopK.Options(density=density, dense_below=0))


@pytest.fixture
def passes(monkeypatch):
    """How often the whole vector was looked at."""
    made = []
    look = Magnitudes.at_least
    monkeypatch.setattr(Magnitudes, "at_least", lambda *args: made.append(1) or look(*args))
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_what_is_sent_are_the_largest_elements_and_nearly_k_of_them(shape, density, passes):
    u = SHAPES[shape](np.random.default_rng(1)).astype(np.float32)
    k = max(1, int(density * D))
    for seed in range(3):
        compressor = sampled(density)
        compressor.reseed(seed)
        for _ in range(2):  # by a sample, and by the threshold of the push before
            passes.clear()
            rest = u.copy()
            sent = compressor.expand(compressor.take(rest), D)
            assert len(passes) <= PASSES_MAX
            number = sent.indices.size
            assert min(0.8 * k, np.count_nonzero(u)) <= number <= k
            if number:
                weakest = np.abs(sent.values).min()
                assert weakest >= np.abs(rest).max()
                assert number == largest(u, number).size


def test_a_run_with_error_feedback_takes_one_pass_per_push(passes):
    compressor, rng = sampled(0.01), np.random.default_rng(2)
    u = np.zeros(D, np.float32)
    numbers = []
    for _ in range(50):
        u += rng.standard_normal(D, dtype=np.float32)
        numbers.append(compressor.take(u).arrays[0].size)
    assert len(passes) <= 55
    assert min(numbers) >= 0.8 * 0.01 * D
    assert np.mean(numbers) >= 0.95 * 0.01 * D


def test_a_threshold_that_has_become_useless_is_found_anew(passes):
    compressor, rng = sampled(0.01), np.random.default_rng(3)
    for scale in (1.0, 1e-6, 1e6, 0.0, 1.0):
        u = (rng.standard_normal(D) * scale).astype(np.float32)
        passes.clear()
        number = compressor.take(u).arrays[0].size
        assert number >= (0.8 * 0.01 * D if scale else 0)
        assert len(passes) <= 3


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 1.0])
def test_what_stays_is_at_most_the_part_of_the_squared_norm_that_the_theory_allows(density):
    for shape in SHAPES.values():
        u = shape(np.random.default_rng(4)).astype(np.float32).astype(np.float64)
        whole = u @ u
        number = sampled(density).take(u).arrays[0].size
        assert u @ u <= (1 - number / D) * whole * (1 + 1e-12)


def test_each_shard_has_its_own_threshold(passes):
    compressor, rng = sampled(0.01), np.random.default_rng(5)
    slices = [rng.standard_normal(D).astype(np.float32) * scale for scale in (1, 1e-5)]
    for _ in range(2):
        passes.clear()
        for shard, u in enumerate(slices):
            compressor.take(u.copy(), shard)
    assert len(passes) == 2
