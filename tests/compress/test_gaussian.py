"""GaussianK: ours finds about k elements of any vector; the published code is repeated exactly."""

import sys

import numpy as np
import pytest
import torch
from scipy import stats

from dlctl.compress.gaussian import Gaussian, GaussianOptions, statistics_of
from dlctl.compress.gaussian_ref import GaussianRef
from dlctl.compress.magnitudes import Magnitudes

D = 20_000
SHAPES = {
    "normal": lambda rng: rng.standard_normal(D),
    "laplace": lambda rng: rng.laplace(size=D),
    "student t3": lambda rng: rng.standard_t(3, D),
    "a mean that is not zero": lambda rng: rng.normal(0.5, 1, D),
    "a negative mean": lambda rng: rng.normal(-3, 1, D),
    "uniform": lambda rng: rng.uniform(-1, 1, D),
    "heavy-tailed": lambda rng: rng.standard_cauchy(D),
    "one large": lambda rng: np.eye(1, D, 5)[0] * 100 + 0.01 * rng.random(D),
}
vectors = pytest.mark.parametrize("shape", SHAPES)
densities = pytest.mark.parametrize("density", [0.001, 0.01, 0.1])


def vector(shape, seed=0):
    return SHAPES[shape](np.random.default_rng(seed)).astype(np.float32)


def published(tensor, density):
    """What GaussianK-SGD's compression.py selects, written down from its description."""
    k = max(int(tensor.numel() * density), 1)
    mean, deviation = float(torch.mean(tensor)), float(torch.std(tensor))
    threshold = mean - stats.norm.ppf((1 - (1 - density)) / 2) * deviation
    for _ in range(3):
        selected = (tensor.abs() > threshold).nonzero().view(-1)
        if selected.numel() < 2 * k / 3:
            threshold *= 0.5
        elif selected.numel() > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return selected.numpy()


@vectors
@densities
def test_the_reference_selects_what_the_published_code_selects(shape, density):
    for seed in range(3):
        u = vector(shape, seed)
        expected = published(torch.from_numpy(u.copy()), density)
        compressor = GaussianRef(GaussianRef.Options(density=density, dense_below=0))
        sent = compressor.expand(compressor.take(u), D)
        assert np.array_equal(sent.indices, expected)


def test_the_reference_can_select_nothing_or_far_too_much_and_ours_does_not():
    numbers = {}
    for name, kind in (("ref", GaussianRef), ("ours", Gaussian)):
        for shape in ("uniform", "a mean that is not zero"):
            packed = kind(kind.Options(density=0.001)).take(vector(shape))
            numbers[name, shape] = packed.arrays[0].size / (0.001 * D)
    assert numbers["ref", "uniform"] == 0
    assert numbers["ref", "a mean that is not zero"] > 4
    assert 2 / 3 <= numbers["ours", "uniform"] <= 4 / 3
    assert 2 / 3 <= numbers["ours", "a mean that is not zero"] <= 4 / 3


@vectors
@densities
def test_ours_sends_two_to_four_thirds_of_k_in_ten_passes(shape, density, monkeypatch):
    passes = []
    look = Magnitudes.at_least
    monkeypatch.setattr(Magnitudes, "at_least", lambda *args: passes.append(1) or look(*args))
    u = vector(shape)
    before = u.astype(np.float64)
    number = Gaussian(Gaussian.Options(density=density)).take(u).arrays[0].size
    assert len(passes) <= 10
    assert 2 / 3 * density * D <= number <= 4 / 3 * density * D
    rest = u.astype(np.float64)
    assert rest @ rest <= (1 - number / D) * (before @ before)


def test_elements_of_one_magnitude_are_cut_to_four_thirds_of_k_and_never_to_none():
    compressor = Gaussian(Gaussian.Options(density=0.01, dense_below=0))
    assert compressor.take(np.full(D, 0.5, np.float32)).arrays[0].size == 0.01 * D * 4 // 3
    assert compressor.take(np.ones(40, np.float32)).arrays[0].size == 1


def test_mean_and_deviation_are_those_of_the_whole_vector():
    u = (np.random.default_rng(1).standard_normal(200_000) * 3 + 2).astype(np.float32)
    mean, deviation = statistics_of(u)
    assert mean == pytest.approx(u.astype(np.float64).mean(), rel=1e-9)
    assert deviation == pytest.approx(u.astype(np.float64).std(ddof=1), rel=1e-6)


@pytest.mark.parametrize("density", [1e-10, 1e-16, 1e-17, sys.float_info.min])
def test_as_small_a_density_as_there_is_sends_something_small(density):
    u = np.random.default_rng(0).standard_normal(5000).astype("f4")
    before = u.copy()
    packed = Gaussian(GaussianOptions(density=density)).take(u)
    delta = Gaussian.expand(packed, 5000)
    assert delta.indices is not None
    assert 0 <= delta.indices.size <= 1
    u[delta.indices] += delta.values
    assert np.array_equal(u, before)
