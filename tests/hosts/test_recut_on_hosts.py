"""The model is cut anew on real hosts, by the bandwidths that their pushes show."""

from __future__ import annotations

import json

import pytest
from workplace import ENDLESS, SLOW_S, TASK, Workplace

from .cluster import Cluster
from .jobs import LONG_S, kill

pytestmark = [pytest.mark.root, pytest.mark.long, pytest.mark.timeout(280)]
METHOD = 'name = "target-batch"\ntarget_samples = 16\n'
SERVERS = 'layout = "bandwidth"\nrecut_s = 2.0\n'
HOSTS = """[[hosts]]
servers = 0
workers = 2
[[hosts]]
ssh = "h1"
servers = 1
workers = 0
[[hosts]]
ssh = "h2"
servers = 1
workers = 0
"""
WIDE = 16_384


def test_shards_follow_the_measured_links_and_nothing_is_lost(
    cluster: Cluster, place: Workplace
) -> None:
    """Nobody has said that h2's link has a tenth of h1's rate."""
    cluster.shape("h1", 100.0)
    cluster.shape("h2", 10.0)
    text = TASK.format(pause_s=SLOW_S, samples=256)
    place.task(text.replace("Linear(2, 8)", f"Linear(2, {WIDE})").replace("8, 2)", f"{WIDE}, 2)"))
    place.job(
        stop=ENDLESS, servers=2, workers=2, algorithm=METHOD, more_servers=SERVERS,
        optimizer='[optimizer]\nname = "momentum"\nlr = 0.01\n', more=HOSTS,
    )  # fmt: skip
    place.start()
    place.until_step(4)
    before = place.run()["shards"]
    place.until("another cut", lambda: place.run()["shards"] != before, LONG_S)
    after = place.run()["shards"]
    assert after[0] > 4 * after[1], (before, after)
    assert sum(after) == sum(before)
    place.until_step(place.run()["step"] + 8, LONG_S)
    incarnations = [place.daemon(f"server-{n}")["incarnation"] for n in range(2)]
    assert incarnations == [1, 1], "their processes go on"
    kill(cluster, "h2", "server-1")
    place.until("another one", lambda: place.daemon("server-1")["incarnation"] == 2, LONG_S)
    place.until_step(place.run()["step"] + 8, LONG_S)
    checked = place.dlctl("verify", "--json")
    assert (checked.code, json.loads(checked.out)["lost"]) == (0, 0), checked.err
    assert place.dlctl("stop").code == 0
    place.nothing_left()
