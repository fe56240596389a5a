"""What a job asks of its hosts, and which of them are connected when."""

from __future__ import annotations

import itertools

from dlctl.health import needs
from dlctl.health.needs import CONTROL, HERE, SHM_BYTES_MIN, Model, NeededLink
from dlctl.job.config import Host, Job, JobFile, Network, Servers, Workers
from dlctl.sim.objectives import layout_of

JOB = Job(name="digits", task="train.py:task")


def job(*hosts: Host, servers: Servers = Servers(count=2), workers: int = 4) -> JobFile:  # noqa: B008
    network = Network(port=7000)
    return JobFile(
        job=JOB, hosts=hosts, servers=servers, workers=Workers(count=workers), network=network
    )


def test_each_host_needs_what_is_placed_there() -> None:
    found = needs.of(job(Host(workers=1, servers=0), Host(ssh="a"), Host(ssh="b")), None)
    assert list(found) == ["agent-0", "agent-1", "agent-2"]
    assert [need.name for need in found.values()] == [HERE, "a", "b"]
    assert [need.workers for need in found.values()] == [1, 2, 1]
    assert [need.servers for need in found.values()] == [(), ("server-0",), ("server-1",)]
    assert found["agent-0"].daemons == 2 + 4 + 3 + 1
    assert found["agent-1"].daemons == 1 + 2 + 1


def test_shared_memory_is_needed_for_shards_that_are_kept_there() -> None:
    model = Model(layout_of(1_000_000), stored_bytes=8_000_000, step=5)
    alone = needs.of(job(), model)["agent-0"]
    assert 8_000_000 * 2 < alone.shm_bytes < 8_000_000 * 3 + (64 << 20)
    assert needs.of(job(), None)["agent-0"].shm_bytes == SHM_BYTES_MIN
    for servers in (
        Servers(durability="disk"),
        Servers(durability="none"),
        Servers(state_dir="/x"),
    ):
        assert needs.of(job(servers=servers), model)["agent-0"].shm_bytes == 0


def test_everybody_reaches_the_coordinator_and_workers_reach_servers() -> None:
    hosts = (Host(workers=1, servers=1), Host(ssh="a", servers=1), Host(ssh="b", servers=0))
    assert needs.links(needs.of(job(*hosts), None)) == [
        NeededLink("agent-0", "agent-1", ("server-1",)),
        NeededLink("agent-1", "agent-0", (CONTROL, "server-0")),
        NeededLink("agent-2", "agent-0", (CONTROL, "server-0")),
        NeededLink("agent-2", "agent-1", ("server-1",)),
    ]
    assert needs.links(needs.of(job(), None)) == []


def test_a_host_measures_one_link_at_a_time_and_all_are_measured() -> None:
    names = [f"agent-{number}" for number in range(6)]
    links = [NeededLink(a, b, (CONTROL,)) for a, b in itertools.permutations(names, 2)]
    rounds = needs.rounds(links)
    assert sorted(itertools.chain(*rounds)) == sorted(links)
    for at_once in rounds:
        ends = [end for link in at_once for end in link[:2]]
        assert len(ends) == len(set(ends))
    assert len(rounds) <= 2 * len(links) / (len(names) / 2), "most hosts have something to do"
