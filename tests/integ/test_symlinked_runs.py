"""A runs directory that is a symbolic link: people put their runs on another disk that way."""

from __future__ import annotations

import os
import signal

import pytest
from workplace import Workplace


@pytest.mark.long
def test_what_a_dead_coordinator_has_left_is_found_behind_a_link(place: Workplace) -> None:
    (place.path / "disk").mkdir()
    (place.path / "runs").symlink_to("disk")
    place.task(pause_s=0.01)
    place.job(stop="{ steps = 100000000 }")
    directory = place.start()
    place.until_step(5)
    left = {name: place.pid(name) for name in ("server-0", "worker-0")}
    doomed = [place.pid("agent-0"), place.pid("coordinator")]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in doomed:
            os.kill(pid, number)

    back = place.dlctl("recover", str(directory))
    assert back.code == 0, back.err
    assert {name: place.pid(name) for name in left} == left, "they went on all the time"
    step = place.run()["step"]
    place.until_step(step + 10)
    assert place.dlctl("stop").code == 0
    place.nothing_left()
