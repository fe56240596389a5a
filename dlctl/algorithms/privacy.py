"""The differential privacy of a run so far, by an accountant (dp-accounting).

Of K clients, every round draws m without replacement; Gaussian noise of z S is added to the sum of
their updates, each no longer than S. Neighbours are two sets of K clients that differ in one of
them, which changes the sum by up to 2 S, so the accountant is given z / 2. Renyi divergences add up
over the rounds: Wang, Balle and Kasiviswanathan, "Subsampled Renyi Differential
Privacy and Analytical Moments Accountant", AISTATS 2019, Theorem 27.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PACKAGE = "dp-accounting"
MISSING = f"the privacy of a run is counted by the package {PACKAGE}, which is not installed here"
HINT = f"pip install {PACKAGE}"
_ORDERS = (*range(2, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
"""Orders of the divergences: omitting one can only make epsilon larger. The accountant's default
orders take it seconds."""


def has_accountant() -> bool:
    return find_spec("dp_accounting") is not None


@cache
def accounting() -> Any:
    """The package: it takes seconds to import. Raises ImportError."""
    return import_module("dp_accounting"), import_module("dp_accounting.rdp")


def epsilon(clients: int, drawn: int, noise_multiplier: float, rounds: int, delta: float) -> float:
    """The epsilon of (epsilon, delta)-differential privacy after so many rounds, for a client as a
    whole. Raises ImportError.
    """
    _, rdp = accounting()
    divergences = [each * rounds for each in _of_round(clients, drawn, noise_multiplier)]
    return float(rdp.compute_epsilon(_ORDERS, divergences, delta)[0]) if rounds else 0.0


@cache
def _of_round(clients: int, drawn: int, noise_multiplier: float) -> Sequence[float]:
    """The divergence of each order: the same in every round."""
    dp, rdp = accounting()
    accountant = rdp.RdpAccountant(_ORDERS, dp.NeighboringRelation.REPLACE_ONE)
    noise = dp.GaussianDpEvent(noise_multiplier / 2)
    accountant.compose(dp.SampledWithoutReplacementDpEvent(clients, drawn, noise))
    return [float(each) for each in accountant.rdp]
