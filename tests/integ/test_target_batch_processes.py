"""target-batch on real processes: they die, join, leave and stand still."""

from __future__ import annotations

import os
import signal

import pytest
from workplace import ENDLESS, SLOW_S, Workplace

METHOD = 'name = "target-batch"\ntarget_samples = 64\ndeadline_s = 1.0'


def kill(place: Workplace, name: str) -> None:
    """Returns when another process of it is at work."""
    before = place.pid(name)
    os.kill(before, signal.SIGKILL)

    def is_replaced() -> bool:
        row = place.run() if name == "coordinator" else place.daemon(name)
        return row["state"] in ("running", "degraded") and row["pid"] not in (None, before)

    place.until(f"another {name}", is_replaced)


def go_on(place: Workplace) -> None:
    place.until_step(place.run()["step"] + 48)


@pytest.mark.long
def test_it_goes_on_whoever_dies_joins_leaves_or_stands_still(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, workers=3, servers=2, algorithm=METHOD)
    place.start()
    place.until_step(16)
    for name in ("worker-1", "server-1", "coordinator"):
        kill(place, name)
        go_on(place)
    for workers in (4, 2):
        scaled = place.dlctl("scale", f"worker={workers}")
        assert scaled.code == 0, scaled.err
        go_on(place)
    silent = place.pid("worker-1")
    os.kill(silent, signal.SIGSTOP)
    try:
        go_on(place)  # The others wait for it for a second, and not until it is replaced.
    finally:
        os.kill(silent, signal.SIGCONT)
    changed = place.dlctl("set", "worker-*", "target_samples=32")
    assert changed.code == 0, changed.err
    go_on(place)
    ended = place.dlctl("stop")
    assert ended.code == 0, ended.err
    run = place.run()
    assert run["state"] == "stopped", place.story()
    assert run["evaluation"]["accuracy"] >= 0.85
    place.nothing_left()
