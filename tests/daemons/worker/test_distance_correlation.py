"""Distance correlation: the values of the package `dcor`, and a gradient wherever one is asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from daemons.worker.split import dcor


def samples(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float64[n, p] and [n, q]; those of "duplicates" have pairs at distance 0."""
    if kind == "doctest":
        whole = np.arange(1.0, 17).reshape(4, 4)
        return torch.tensor(whole), torch.tensor([[1.0], [0], [0], [1]], dtype=torch.float64)
    rng = np.random.default_rng(7)
    x = rng.standard_normal((20, 5))
    linear = x @ rng.standard_normal((5, 3))
    independent = rng.standard_normal((20, 8))
    pairs = {
        "linear": (x, linear),
        "square": (x, x[:, :2] ** 2),
        "independent": (x, independent),
        "duplicates": (np.repeat(x[:5], 4, 0), np.repeat(x[5:10], 4, 0)),
    }
    found, other = pairs[kind]
    return torch.tensor(found), torch.tensor(other)


PACKAGE = {
    "linear": (0.8049942095957667, 0.5257286408216036),
    "square": (0.7597830918860765, 0.4297487561711747),
    "independent": (0.7530380571269476, 0.1129085380076547),
    "duplicates": (0.8990341262899809, 0.7943511674524947),
    "doctest": (0.5266403878479267, -0.49999999999999917),
}
"""What dcor 0.7 returns: distance_correlation and u_distance_correlation_sqr. It needs numba, so it
was run once, on the samples above."""


@pytest.mark.oracle("split", "distance correlations of the package dcor 0.7")
@pytest.mark.parametrize("kind", PACKAGE)
def test_the_values_are_those_of_the_package(kind, agree):
    x, z = samples(kind)
    agree([float(dcor.dcor(x, z)), float(dcor.u_dcor2(x, z))], PACKAGE[kind], atol=1e-10)


@pytest.mark.oracle("split", "distance correlations, sums written out")
def test_the_values_are_those_of_the_sums_of_the_definition(agree):
    x, z = samples("square")
    n = len(x)
    a, b = ([[float((u - v).norm()) for v in of] for u in of] for of in (x, z))

    def biased(d):
        row = [sum(line) / n for line in d]
        return [[d[i][j] - row[i] - row[j] + sum(row) / n for j in range(n)] for i in range(n)]

    def unbiased(d):
        row = [sum(line) for line in d]
        rest = sum(row) / ((n - 1) * (n - 2))
        return [
            [0.0 if i == j else d[i][j] - (row[i] + row[j]) / (n - 2) + rest for j in range(n)]
            for i in range(n)
        ]

    def product(u, v):
        return sum(u[i][j] * v[i][j] for i in range(n) for j in range(n))

    found = []
    for centre in (biased, unbiased):
        u, v = centre(a), centre(b)
        found.append(product(u, v) / (product(u, u) * product(v, v)) ** 0.5)
    agree([float(dcor.dcor(x, z)) ** 2, float(dcor.u_dcor2(x, z))], found, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["diagonal", "duplicates", "constant z", "constant x", "tiny"])
def test_its_gradient_is_finite(case, dtype):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)
    z = {
        "diagonal": x.clone(),
        "duplicates": x[[0, 0, 0, 0, 1, 1, 1, 1]],
        "constant z": torch.ones(8, 2, dtype=dtype),
        "constant x": x.clone(),
        "tiny": x * 1e-18,
    }[case].requires_grad_()
    seen = torch.ones_like(x) if case == "constant x" else x
    value = dcor.dcor(seen, z)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(z.grad).all()
    assert torch.isfinite(dcor.u_dcor2(seen, z.detach()))
    if case.startswith("constant"):
        assert not z.grad.any()
        assert float(dcor.u_dcor2(seen, z.detach())) == 0


def test_its_gradient_is_that_of_finite_differences():
    x, z = samples("square")
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: dcor.dcor(x, z), [z], atol=1e-6)


def test_the_biased_one_is_near_1_for_independent_samples_and_the_reported_one_is_not():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 784, generator=generator)
    z = torch.randn(32, 128, generator=generator)
    assert float(dcor.dcor(x, z)) > 0.9
    assert abs(float(dcor.u_dcor2(x, z))) < 0.1
    assert dcor.p_value(x, z, 99, generator) > 0.05
    assert dcor.p_value(x, torch.relu(x[:, :128]), 99, generator) == 0.01


@pytest.mark.parametrize("function", [dcor.dcor, dcor.u_dcor2])
def test_fewer_than_four_samples_are_refused(function):
    with pytest.raises(ValueError, match="4 or more"):
        function(torch.zeros(3, 2), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="3 of z"):
        function(torch.zeros(4, 2), torch.zeros(3, 2))
