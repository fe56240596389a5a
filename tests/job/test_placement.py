"""Which host gets which daemons."""

from __future__ import annotations

from collections import Counter

import pytest

from dlctl.job import config
from dlctl.job.config import Host
from dlctl.job.placement import agents, place, takes_workers
from dlctl.util.names import HOME_AGENT


def job(servers: int, workers: int, *hosts: Host) -> config.JobFile:
    return config.JobFile(
        job=config.Job(name="placed", task="none"),
        servers=config.Servers(count=servers),
        workers=config.Workers(count=workers),
        hosts=hosts,
    )


def test_without_hosts_everything_is_at_home():
    assert set(place(job(2, 3)).values()) == {HOME_AGENT}
    assert list(agents(())) == [HOME_AGENT]


def test_daemons_are_spread_evenly_and_the_first_hosts_get_what_is_left_over():
    placed = place(job(2, 7, Host(ssh="a"), Host(ssh="b"), Host(ssh="c")))
    workers = Counter(agent for name, agent in placed.items() if name.startswith("worker"))
    assert workers == {"agent-1": 3, "agent-2": 2, "agent-3": 2}
    assert (placed["server-0"], placed["server-1"]) == ("agent-1", "agent-2")
    assert len(placed) == 9


def test_this_machine_takes_part_only_if_it_is_listed():
    listed = place(job(2, 2, Host(), Host(ssh="a")))
    assert listed == {
        "server-0": HOME_AGENT, "server-1": "agent-1",
        "worker-0": HOME_AGENT, "worker-1": "agent-1",
    }  # fmt: skip
    assert HOME_AGENT not in place(job(2, 2, Host(ssh="a"))).values()
    assert HOME_AGENT in agents([Host(ssh="a")]), "but it starts the coordinator again"


def test_a_host_gets_what_it_asks_for_and_the_others_share_the_rest():
    placed = place(job(2, 6, Host(servers=2, workers=0), Host(ssh="a", workers=1), Host(ssh="b")))
    assert Counter(placed.values()) == {HOME_AGENT: 2, "agent-1": 1, "agent-2": 5}


def test_workers_may_be_added_to_all_hosts_and_are_not_wanted_where_the_job_has_none():
    assert takes_workers(job(1, 1)) == {HOME_AGENT: True}
    others = (Host(ssh="a"), Host(ssh="b"))
    assert takes_workers(job(1, 1, *others)) == {"agent-1": True, "agent-2": True}
    only_servers = Host(ssh="a", servers=1, workers=0)
    hosts = (Host(workers=0), only_servers, Host(ssh="b", workers=2), Host(ssh="c"))
    assert takes_workers(job(1, 2, *hosts)) == {
        HOME_AGENT: False, "agent-1": False, "agent-2": True, "agent-3": True,
    }  # fmt: skip


@pytest.mark.parametrize("hosts", range(1, 6))
def test_every_daemon_is_placed_once(hosts):
    placed = place(job(3, 11, *(Host(ssh=f"h{i}") for i in range(hosts))))
    assert sorted(placed) == sorted(
        [f"server-{i}" for i in range(3)] + [f"worker-{i}" for i in range(11)]
    )
