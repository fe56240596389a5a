"""What the tests of simulated runs share."""

import sys

import pytest

from dlctl.roles.worker.bad_gradients import BadGradients


@pytest.fixture
def heedless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers push what is too large, as many smaller gradients may be together, and as one does
    that lies: it is for the servers to refuse it.
    """
    monkeypatch.setattr(BadGradients, "norm_max", lambda poison, own_lr: sys.float_info.max)
