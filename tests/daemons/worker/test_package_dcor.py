"""Distance correlations next to those of the package dcor, on other samples each. `make oracles`
has it; the values of some are in `test_distance_correlation.py`."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch

from daemons.worker.split import dcor

theirs = oracles.package("dcor")


@pytest.mark.oracle("split", "the package dcor")
@pytest.mark.parametrize(("n", "p", "q"), [(4, 3, 2), (20, 5, 3), (64, 30, 1)])
def test_values_are_those_of_the_package(n: int, p: int, q: int, agree) -> None:
    rng = np.random.default_rng([n, p, q])
    x = rng.standard_normal((n, p))
    z = np.tanh(x @ rng.standard_normal((p, q))) + 0.3 * rng.standard_normal((n, q))
    ours = [float(of(torch.tensor(x), torch.tensor(z))) for of in (dcor.dcor, dcor.u_dcor2)]
    expected = [
        theirs.distance_correlation(x, z), theirs.u_distance_correlation_sqr(x, z),
    ]  # fmt: skip
    agree(ours, expected, atol=1e-10)
