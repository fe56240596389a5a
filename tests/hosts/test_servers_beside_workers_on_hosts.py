"""placement = "workers" on two hosts: each serves half of the model; one of them is lost."""

from __future__ import annotations

from typing import Any

import pytest
from workplace import Workplace

from .cluster import Cluster
from .jobs import LONG_S, SLOW_S

pytestmark = [pytest.mark.root, pytest.mark.long, pytest.mark.timeout(240)]
H1, H2 = ('[[hosts]]\nssh = "h1"\n', '[[hosts]]\nssh = "h2"\n')
LIMITS = "[timeouts]\nsilent_s = 2.0\nhost_s = 4.0\n"


def write(place: Workplace, hosts: str, workers: int) -> None:
    place.task(pause_s=SLOW_S)
    place.job(
        stop="{ steps = 100000000 }", servers=1, workers=workers, checkpoint_every_s=1.0,
        algorithm='name = "sync"', more=hosts + LIMITS,
    )  # fmt: skip
    file = place.path / "job.toml"
    text = file.read_text()
    assert "[servers]\ncount = 1\n" in text
    file.write_text(text.replace("[servers]\ncount = 1\n", '[servers]\nplacement = "workers"\n'))


def sums(place: Workplace) -> list[int]:
    rows: dict[str, dict[str, Any]] = place.run().get("links", {})
    return [row["out_bytes"] + row["in_bytes"] for row in rows.values()]


def test_both_links_carry_the_same_and_without_a_host_the_other_goes_on(
    cluster: Cluster, place: Workplace
) -> None:
    write(place, H1 + H2, workers=2)
    place.start()
    where = {name: place.daemon(name)["host"] for name in ("server-0", "server-1")}
    assert where == {"server-0": "h1", "server-1": "h2"}
    place.until_step(60)
    place.until("a checkpoint is here", lambda: place.run().get("checkpoint"))
    found = sums(place)
    assert len(found) == 2
    assert max(found) / (sum(found) / 2) <= 1.1
    assert {row["host"] for row in place.run()["links"].values()} == {"h1", "h2"}
    assert "links" in place.dlctl("status").out

    cluster.lose("h2")
    place.until("it is missed", lambda: "server-1" in place.dlctl("why").out, LONG_S)
    place.until_state("failed", timeout_s=LONG_S)
    assert "remove h2" in place.dlctl("why").out
    step = place.run()["checkpoint"]["step"]
    write(place, H1, workers=1)
    ended = place.dlctl("start", "job.toml")
    assert ended.code == 0, ended.err
    place.until_step(step + 20)
    assert [row["name"] for row in place.run()["daemons"] if row["role"] == "server"] == [
        "server-0"
    ]
    assert place.dlctl("stop").code == 0
    place.nothing_left()
