"""The model is cut anew on real processes, by the bandwidths that their pushes show."""

from __future__ import annotations

import json
import os
import signal

import fake_launchers
import pytest
from workplace import ENDLESS, SLOW_S, TASK, Workplace

METHOD = 'name = "target-batch"\ntarget_samples = 16\n'
SERVERS = 'layout = "bandwidth"\nrecut_s = 2.0\n'
HOSTS = """[[hosts]]
servers = 0
workers = 2
bandwidth = "1GB/s"
[[hosts]]
ssh = "box-1"
dir = "{0}/boxes/box-1"
servers = 1
workers = 0
bandwidth = "100MB/s"
[[hosts]]
ssh = "box-2"
dir = "{0}/boxes/box-2"
servers = 1
workers = 0
bandwidth = "10MB/s"
"""
WIDE = 16_384


def killed(place: Workplace, name: str) -> None:
    """Kill a daemon; returns when another process of it is at work."""
    before = place.pid(name)
    os.kill(before, signal.SIGKILL)

    def is_replaced() -> bool:
        row = place.run() if name == "coordinator" else place.daemon(name)
        at_work = row.get("state") in ("running", "degraded")
        return at_work and row.get("pid") not in (None, before)

    place.until(f"another {name}", is_replaced)


@pytest.mark.timeout(240)
@pytest.mark.long
def test_shards_follow_measured_bandwidths_and_lose_nothing(place: Workplace) -> None:
    """The links of both boxes are as fast as each other, whatever the job file states."""
    place.env["PATH"] = f"{fake_launchers.install(place.path)}:{place.env['PATH']}"
    text = TASK.format(pause_s=SLOW_S, samples=256)
    place.task(text.replace("Linear(2, 8)", f"Linear(2, {WIDE})").replace("8, 2)", f"{WIDE}, 2)"))
    place.job(
        stop=ENDLESS, servers=2, workers=2, algorithm=METHOD, more_servers=SERVERS,
        optimizer='[optimizer]\nname = "momentum"\nlr = 0.01\n', more=HOSTS.format(place.path),
    )  # fmt: skip
    place.start()
    place.until_step(4)
    before = place.run()["shards"]
    assert before[0] > 8 * before[1]
    place.until("another cut", lambda: place.run()["shards"] != before, 60.0)
    after = place.run()["shards"]
    assert after[1] > 2 * before[1], after
    assert sum(after) == sum(before)
    pids = [place.pid(f"server-{n}") for n in range(2)]
    place.until_step(place.run()["step"] + 16)
    assert pids == [place.pid(f"server-{n}") for n in range(2)], "their processes go on"
    for name in ("server-1", "worker-0", "coordinator"):
        killed(place, name)
        place.until_step(place.run()["step"] + 8)
    checked = place.dlctl("verify", "--json")
    assert (checked.code, json.loads(checked.out)["lost"]) == (0, 0), checked.err
    ended = place.dlctl("stop")
    assert ended.code == 0, ended.err
    run = place.run()
    assert run["state"] == "stopped", place.story()
    assert run["evaluation"]["accuracy"] >= 0.85
    place.nothing_left()
