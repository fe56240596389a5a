"""A run trains as fast while its store is down for two minutes as while it is there."""

from __future__ import annotations

import time

import pytest
from s3_servers import Proxy
from test_mirrored_runs import PATIENCE_S, SLOW_S, job, newer, problem, start
from workplace import Workplace

UP_S, DOWN_S = 60.0, 120.0
LEAST = 0.98


@pytest.mark.long
def test_two_minutes_without_a_store_cost_no_speed(
    place: Workplace, prefix: str, proxy: Proxy
) -> None:
    place.task(pause_s=SLOW_S)
    job(place, prefix)
    start(place)
    before = place.until("one is mirrored", newer(place), PATIENCE_S)
    first = rate(place, UP_S)
    proxy.down()
    without = rate(place, DOWN_S)
    assert problem(place, "mirror-behind")
    proxy.up()
    place.until("it is mirrored again", newer(place, before), PATIENCE_S)
    again = rate(place, UP_S)
    with_store = (first + again) / 2
    print(f"steps/s: {first:.2f} and {again:.2f} with the store, {without:.2f} without")
    assert without >= LEAST * with_store, f"{without:.2f} of {with_store:.2f} steps/s"
    assert place.dlctl("stop", timeout_s=PATIENCE_S).code == 0


def rate(place: Workplace, seconds: float) -> float:
    """Steps per second over a time."""
    began, step = time.monotonic(), place.run()["step"]
    place.until("time is over", lambda: time.monotonic() > began + seconds, seconds + 10.0)
    return float((place.run()["step"] - step) / (time.monotonic() - began))
