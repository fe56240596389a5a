"""What differential privacy a run has come to, by an accountant of its own (dp-accounting).

Of K clients, every round draws m without replacement; the sum of their ways, each no longer than
S, has Gaussian noise of z S put on it. Neighbours are two sets of K clients that differ in one of
them, so what it changes of the sum is up to 2 S, and the accountant is told z / 2. Renyi
divergences add up over the rounds: Wang, Balle and Kasiviswanathan, "Subsampled Renyi Differential
Privacy and Analytical Moments Accountant", AISTATS 2019, Theorem 27.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

PACKAGE = "dp-accounting"
MISSING = f"the privacy of a run is counted by the package {PACKAGE}, which is not installed here"
HINT = f"pip install {PACKAGE}"


def has_accountant() -> bool:
    return find_spec("dp_accounting") is not None


@lru_cache(maxsize=8)
def epsilon(clients: int, drawn: int, noise_multiplier: float, rounds: int, delta: float) -> float:
    """Of (epsilon, delta)-differential privacy, for a client as a whole. Raises ImportError."""
    import dp_accounting as dp
    from dp_accounting import rdp

    if not rounds:
        return 0.0
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    noise = dp.GaussianDpEvent(noise_multiplier / 2)
    accountant.compose(dp.SampledWithoutReplacementDpEvent(clients, drawn, noise), rounds)
    return float(accountant.get_epsilon(delta))
