"""Tests of optimisers twice: with the loops in C, if they were built, and with numpy."""

from collections.abc import Iterator

import pytest

from dlctl import kernels

LOOPS = ["numpy"] if kernels.missing() else ["C", "numpy"]


@pytest.fixture(autouse=True, params=LOOPS)
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Import it, and each test of that file runs with each of them."""
    if request.param == "numpy":
        monkeypatch.setattr(kernels, "_loaded", lambda: (None, "for this test"))
    kernels._steps.cache_clear()
    yield request.param
    kernels._steps.cache_clear()
