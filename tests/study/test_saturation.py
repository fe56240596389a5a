"""What saturates first, from windows of two sizes."""

from __future__ import annotations

from typing import Any

import pytest

from dlctl.study import saturation


def window(
    workers: int,
    halves: tuple[float | None, float | None] = (10.0, 10.0),
    each: float = 1.0,
    *,
    is_whole: bool = True,
    **busy: float,
) -> Any:
    """each: steps per second of a worker."""
    shares = {kind: {"name": f"{kind}-0", "share": share} for kind, share in busy.items()}
    steps = each * workers
    row = {"workers": workers, "busy": shares, "halves": halves, "steps_per_s": steps}
    return {**row, "is_whole": is_whole}


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
    assert not saturation.free(none)
    assert saturation.error(none) is None
    found = saturation.first([window(16, link=0.1), window(64, each=0.0, link=0.1)])
    assert found is not None
    assert found.workers == pytest.approx(144)
    assert not saturation.free([window(16, link=1.0)])
    assert saturation.free([window(16, link=0.5)])


@pytest.mark.parametrize("halves", [(20.0, 0.0), (20.0, None), (None, None)])
def test_a_window_that_was_cut_within_a_round_tells_nothing(halves: Any) -> None:
    """Its steps were all in the first part, so workers seem fast, and what is busy seems idle."""
    cut, large = window(16, halves, is_whole=False, link=0.3), window(64, each=0.2, link=0.5)
    assert saturation.free([cut, large]) == [large]
    assert saturation.error([cut, large]) is None
    assert saturation.spread(cut) is None
    two = window(16, (9.0, 11.0), is_whole=False, link=0.1)
    assert saturation.free([two]) == [two]
    assert saturation.spread(two) == pytest.approx(0.1)


def test_nothing_is_foretold_from_a_small_window_without_a_step() -> None:
    small, large = window(16, each=0.0, link=0.3), window(64, link=0.5)
    assert saturation.error([small, large]) is None
