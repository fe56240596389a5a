"""Bytes over the links of hosts: both ends, over all processes, whatever a worker reports."""

from __future__ import annotations

from typing import Any

import pytest

from dlctl.cli.ui import report
from dlctl.roles.coordinator.link_bytes import LinkBytes
from dlctl.roles.coordinator.members.membership import Membership

PLACED = {"server-0": "agent-1", "server-1": "agent-2", "worker-0": "agent-1"}


@pytest.fixture
def members() -> Membership:
    found = Membership(["agent-0", "agent-1", "agent-2"], dict(PLACED), {})
    for daemon in found.daemons.values():
        daemon.begin(0.0)
        daemon.host = daemon.agent.replace("agent-", "h")
    return found


def pairs(**of: tuple[int, int]) -> dict[str, Any]:
    return {"links": {name.replace("_", "-"): [*pair] for name, pair in of.items()}}


def test_both_ends_have_it_and_what_stays_within_a_host_counts_for_neither(members: Any) -> None:
    links, worker = LinkBytes(members, {}, {}), members.daemons["worker-0"]
    links.count(worker, pairs(server_0=(900, 900), server_1=(10, 30)))
    links.count(worker, pairs(server_0=(999, 999), server_1=(15, 40)))
    assert links.look() == {
        "agent-1": {"host": "h1", "out_bytes": 15, "in_bytes": 40},
        "agent-2": {"host": "h2", "out_bytes": 40, "in_bytes": 15},
    }


def test_a_new_process_and_a_new_coordinator_count_on(members: Any) -> None:
    links, worker = LinkBytes(members, {}, {}), members.daemons["worker-0"]
    metrics = links.count(worker, pairs(server_1=(10, 30)))
    row = {"incarnation": worker.incarnation, "metrics": metrics}
    after = LinkBytes(members, links.look(), {"worker-0": row})
    after.count(worker, pairs(server_1=(12, 30)))
    worker.incarnation += 1
    after.count(worker, pairs(server_1=(5, 0)))
    assert after.look()["agent-1"] == {"host": "h1", "out_bytes": 17, "in_bytes": 30}


def test_what_is_stored_of_a_worker_is_one_sum_however_many_peers_it_has(members: Any) -> None:
    links, worker = LinkBytes(members, {}, {}), members.daemons["worker-0"]
    stored = links.count(worker, {"step": 3} | pairs(server_0=(900, 900), server_1=(10, 30)))
    assert stored == {"step": 3, "links": {"out_bytes": 10, "in_bytes": 30}}
    assert links.count(worker, {"step": 3}) == {"step": 3}


def test_a_new_coordinator_divides_the_sum_among_the_peers_and_loses_nothing(members: Any) -> None:
    worker = members.daemons["worker-0"]
    members.daemons["server-0"].agent = "agent-0"
    links = LinkBytes(members, {}, {})
    metrics = links.count(worker, pairs(server_0=(100, 7), server_1=(301, 9)))
    row = {"incarnation": worker.incarnation, "metrics": metrics}
    after = LinkBytes(members, links.look(), {"worker-0": row})
    after.count(worker, pairs(server_0=(200, 14), server_1=(602, 18)))
    found = after.look()
    assert (found["agent-1"]["out_bytes"], found["agent-1"]["in_bytes"]) == (802, 32)
    assert found["agent-0"]["in_bytes"] + found["agent-2"]["in_bytes"] == 802
    assert found["agent-0"]["in_bytes"] == pytest.approx(200, abs=1)
    after.count(worker, pairs(server_0=(201, 14), server_1=(602, 18)))
    assert after.look()["agent-1"]["out_bytes"] == 803


def test_rows_of_an_earlier_version_with_a_pair_for_each_peer_are_not_counted_again(
    members: Any,
) -> None:
    worker = members.daemons["worker-0"]
    row = {
        "incarnation": worker.incarnation,
        "metrics": pairs(server_0=(900, 9), server_1=(10, 30)),
    }
    before = {"agent-1": {"out_bytes": 10, "in_bytes": 30}}
    links = LinkBytes(members, before, {"worker-0": row})
    links.count(worker, pairs(server_0=(900, 9), server_1=(12, 30)))
    assert links.look()["agent-1"] == {"host": "h1", "out_bytes": 12, "in_bytes": 30}


@pytest.mark.parametrize(
    "odd",
    [
        {}, {"links": 1}, {"links": {"server-1": 3}}, {"links": {"server-1": [1]}},
        {"links": {"server-1": [-1, "x"]}}, {"links": {"server-1": [True, 2**64]}},
        {"links": {"server-9": [1, 1], "": [1, 1]}},
    ],
)  # fmt: skip
def test_what_is_no_count_counts_nothing(members: Any, odd: dict[str, Any]) -> None:
    links = LinkBytes(members, {"agent-1": odd}, {})
    links.count(members.daemons["worker-0"], odd)
    assert not sum(row[key] for row in links.look().values() for key in ("out_bytes", "in_bytes"))


def test_status_has_the_links_and_says_how_even_they_are() -> None:
    rows = report.links({f"agent-{n}": {"host": f"h{n}", "out_bytes": 10 * n, "in_bytes": 0}
                         for n in (1, 3)})  # fmt: skip
    assert rows == [("h1", 10, 0), ("h3", 30, 0)]
    assert "1.50 x" in report.links_in_words(rows)
    assert report.links({"agent-1": {"host": "h1"}, "agent-2": 3}) == report.links(None) == []


def test_status_has_the_shares_of_servers_if_they_differ() -> None:
    assert "server-0 75.0 %" in report.shards([3, 1])
    assert report.shards([3, 3, 2]) == report.shards(None) == report.shards(["x"]) == ""
