"""`dlctl recover` when what is left of a run is on several hosts."""

from __future__ import annotations

import json

import psutil
import pytest
from workplace import Workplace

from .cluster import Cluster
from .jobs import HOSTS, LONG_S, begin, daemons, kill

pytestmark = [pytest.mark.root, pytest.mark.long]
IMPATIENT = "[timeouts]\nsilent_s = 2.0\nhost_s = 4.0\n"


def kill_home(place: Workplace) -> None:
    """Coordinator and agent of the machine where one types."""
    place.kill_at_once([psutil.Process(place.pid(name)) for name in ("coordinator", "agent-0")])


def all_make_steps(place: Workplace) -> None:
    """Every worker goes on, and not only those that were never gone."""

    def steps() -> list[int]:
        return [place.daemon(f"worker-{i}").get("metrics", {}).get("step", 0) for i in range(3)]

    begun = steps()
    place.until(
        "all workers make steps",
        lambda: all(a > b for a, b in zip(steps(), begun, strict=True)),
        LONG_S,
    )


def test_when_all_is_dead_at_home_the_others_are_found_again_and_nothing_is_lost(
    cluster: Cluster, place: Workplace
) -> None:
    begin(place)
    place.until_step(20)
    kill_home(place)
    assert daemons(cluster, "h2")
    assert "dlctl recover" in place.dlctl("status").out
    ended = place.dlctl("recover", "--dry-run", "--json")
    found = json.loads(ended.out)
    assert (found["way"], found["away"]) == ("go on", {})
    assert {"server-0", "server-1", "worker-2"} <= set(found["alive"])
    assert place.dlctl("recover").code == 0
    all_make_steps(place)
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code == 0
    place.nothing_left()


def test_when_everything_is_dead_everywhere_the_shards_on_the_hosts_are_gone_on_with(
    cluster: Cluster, place: Workplace
) -> None:
    begin(place)
    place.until_step(20)
    kill_home(place)
    for host in ("h1", "h2", "h3"):
        # The agent first, or it would start the others again.
        for name in sorted({*daemons(cluster, host)}):
            # A worker exits when it sees that its agent and the coordinator are gone.
            kill(cluster, host, name, may_be_gone=name.startswith("worker"))
    ended = place.dlctl("recover")
    assert ended.code == 0, ended.err
    assert "h2:" in ended.out, "where that shard is kept"
    assert "nothing is lost" in ended.out
    all_make_steps(place)
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code == 0
    place.nothing_left()


def test_a_run_that_has_failed_for_want_of_a_host_goes_on_when_that_is_back(
    cluster: Cluster, place: Workplace
) -> None:
    begin(place, HOSTS + IMPATIENT, checkpoint_every_s=1.0)
    place.until("a checkpoint is here", lambda: place.run().get("checkpoint"))
    cluster.cut("h2")
    place.until_state("failed", timeout_s=LONG_S)
    assert "resumes once h2 can be reached again" in place.dlctl("status").out
    for command in (("recover",), ("start", "job.toml")):
        ended = place.dlctl(*command)
        assert ended.code == 5, ended.err
        assert "cannot resume without h2" in ended.err
        words = " ".join(ended.err.split())
        assert "remove h2 from job.toml, then dlctl start job.toml resumes from the" in words
    step = place.run()["step"]
    cluster.heal("h2")
    ended = place.dlctl("recover")
    assert ended.code == 0, ended.err
    assert "nothing is lost" in ended.out
    place.until_step(step + 20)
    all_make_steps(place)
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code == 0
    place.nothing_left()
