"""A script with a training loop of its own, whose workers are on two hosts over ssh."""

from __future__ import annotations

import pytest
from workplace import Workplace

from .cluster import Cluster
from .jobs import LONG_S, daemons, host_files, hurry, kill, write_loop

pytestmark = [pytest.mark.root, pytest.mark.long, pytest.mark.timeout(400)]

TWO_HOSTS = '[[hosts]]\nssh = "h1"\n[[hosts]]\nssh = "h2"\nservers = 0\n'
END_S = 240.0


@pytest.mark.parametrize("workers", [2, 4])
def test_a_script_trains_over_ssh_and_returns_when_it_is_killed(
    cluster: Cluster, place: Workplace, workers: int
) -> None:
    write_loop(place, workers, TWO_HOSTS)
    place.start()
    place.until_step(20, LONG_S)
    on_h2 = [name for name in daemons(cluster, "h2") if name.startswith("worker")]
    assert len({*on_h2}) == workers // 2
    kill(cluster, "h2", on_h2[-1])
    place.until("it begins anew", lambda: place.daemon(on_h2[-1])["incarnation"] == 2, LONG_S)
    place.until("it trains", lambda: place.daemon(on_h2[-1])["state"] == "running", LONG_S)
    hurry(cluster, cluster.names)
    place.until_state("finished", "failed", timeout_s=END_S)
    run = place.run()
    assert run["state"] == "finished", place.story()
    assert run["evaluation"]["accuracy"] >= 0.8
    assert place.dlctl("verify").code == 0
    for name in cluster.names:
        assert not host_files(cluster, name)
    place.nothing_left()
