"""What saturates first, from windows of two sizes."""

from __future__ import annotations

from typing import Any

import pytest

from dlctl.study import saturation


def window(
    workers: int, halves: tuple[float, float] = (10.0, 10.0), each: float = 1.0, **busy: float
) -> Any:
    """each: steps per second of a worker."""
    shares = {kind: {"name": f"{kind}-0", "share": share} for kind, share in busy.items()}
    steps = each * workers
    return {"workers": workers, "busy": shares, "halves": halves, "steps_per_s": steps}


def test_what_needs_the_fewest_workers_is_first() -> None:
    found = saturation.first([window(10, server=0.1, link=0.3), window(40, server=0.4, link=0.6)])
    assert found is not None
    assert (found.kind, found.name) == ("link", "link-0")
    assert found.workers == pytest.approx(60)


def test_where_something_is_saturated_the_smaller_window_tells() -> None:
    found = saturation.first([window(10, coordinator=0.3), window(40, coordinator=1.0)])
    assert found is not None
    assert found.workers == pytest.approx(30)


def test_workers_are_no_bottleneck_of_others() -> None:
    assert saturation.first([window(10, worker=0.99, own_link=1.0)]) is None


def test_where_workers_wait_the_smaller_window_tells_although_nothing_is_always_busy() -> None:
    """After a barrier all fetch at once, and then all push: both directions are idle in turn."""
    few, many = window(10, link=0.3), window(40, each=0.25, link=0.5)
    found = saturation.first([few, many])
    assert found is not None
    assert found.workers == pytest.approx(30)
    assert saturation.error([few, many]) is None


def test_the_error_is_that_of_a_foretold_share() -> None:
    small, large = window(10, server=0.1), window(40, server=0.5)
    assert saturation.error([small, large]) == pytest.approx(-0.2)
    assert saturation.error([small, window(40, server=0.95)]) is None
    assert saturation.error([large]) is None
    assert saturation.error([window(2, server=0.01), small, large]) == pytest.approx(-0.2)
    assert saturation.spread(window(10, halves=(12.0, 8.0))) == pytest.approx(0.2)


def test_a_window_without_a_step_tells_nothing() -> None:
    none = [window(16, each=0.0, link=0.3), window(64, each=0.0, link=0.5)]
    assert not saturation.is_known(none)
    assert saturation.error(none) is None
    found = saturation.first([window(16, link=0.1), window(64, each=0.0, link=0.1)])
    assert found is not None
    assert found.workers == pytest.approx(144)
    assert not saturation.is_known([window(16, link=1.0)])
    assert saturation.is_known([window(16, link=0.5)])
