"""Replicas without servers, and replicas of several processes, on three hosts: they learn the
digits to the end, while workers are killed and hosts are cut off or lost.
"""

from __future__ import annotations

import psutil
import pytest
from workplace import Workplace

from .cluster import Cluster
from .jobs import HOSTS, LONG_S, daemons, hurry, kill, until_moved, write_digits

pytestmark = [pytest.mark.root, pytest.mark.long, pytest.mark.timeout(400)]

METHODS = ["allreduce", "gossip", "noloco"]
PRIVATE = "[network]\nprivate = true\n"
IMPATIENT = "[timeouts]\nsilent_s = 5.0\n"
END_S = 240.0


def at_addresses(cluster: Cluster) -> str:
    """The hosts, each with its address in the job file."""
    return "".join(
        f'[[hosts]]\nssh = "{n}"\ndata = "{cluster.address(n)}"\n' for n in cluster.names
    )


def until_back(place: Workplace, worker: str) -> None:
    """It has died."""
    place.until("it begins anew", lambda: place.daemon(worker)["incarnation"] == 2, LONG_S)
    place.until("it works", lambda: place.daemon(worker)["state"] == "running", 2 * LONG_S)


def cut_and_heal(cluster: Cluster, place: Workplace) -> None:
    """For longer than the limit of silence; the others go on meanwhile."""
    cluster.cut("h3")
    place.until("it is missed", lambda: place.daemon("agent-3")["restarts"], LONG_S)
    place.until_step(place.run()["step"] + 20, LONG_S)
    cluster.heal("h3")
    place.until_state("running", timeout_s=LONG_S)


def until_learned(place: Workplace) -> None:
    place.until_state("finished", "failed", timeout_s=END_S)
    run = place.run()
    assert run["state"] == "finished", place.story()
    assert run["evaluation"]["accuracy"] >= 0.9
    assert place.dlctl("verify").code == 0
    place.nothing_left()


def test_a_group_over_hosts_is_refused_without_a_private_network(
    cluster: Cluster, place: Workplace
) -> None:
    write_digits(cluster, place, "allreduce", HOSTS)
    for command in ("validate", "start"):
        ended = place.dlctl(command, "job.toml")
        assert ended.code == 2
        words = " ".join(ended.err.split())
        assert "neither encrypted nor authenticated" in words
        assert "[network] private = true" in words
        assert "job.toml:6" in words
    for method, more in (("allreduce", PRIVATE), ("gossip", "")):
        write_digits(cluster, place, method, HOSTS + more)
        assert place.dlctl("validate", "job.toml").code == 0


@pytest.mark.parametrize("method", METHODS)
def test_replicas_learn_while_one_is_killed_and_a_host_is_cut_off(
    cluster: Cluster, place: Workplace, method: str
) -> None:
    write_digits(cluster, place, method, HOSTS + PRIVATE + IMPATIENT)
    place.start()
    place.until_step(20, LONG_S)
    for number, name in enumerate(cluster.names):
        assert f"worker-{number}" in daemons(cluster, name)
        found = [port for port in cluster.listening(name) if port.process != "sshd"]
        assert {port.address for port in found} == {cluster.address(name)}
    kill(cluster, "h2", "worker-1")
    until_back(place, "worker-1")
    cut_and_heal(cluster, place)
    hurry(cluster, cluster.names)
    until_learned(place)


@pytest.mark.parametrize("method", METHODS)
def test_a_replica_whose_host_is_lost_learns_on_at_the_address_of_another_one(
    cluster: Cluster, place: Workplace, method: str
) -> None:
    limits = f"{IMPATIENT}host_s = 10.0\n"
    write_digits(cluster, place, method, at_addresses(cluster) + PRIVATE + limits)
    place.start()
    place.until_step(20, LONG_S)
    cluster.lose("h3")
    until_moved(place)
    hurry(cluster, ["h1", "h2"])
    until_learned(place)


def test_both_processes_of_a_cut_replica_are_on_its_host_and_die_together(
    cluster: Cluster, place: Workplace
) -> None:
    cut = "[replica]\nfsdp = 2\n[timeouts]\nsilent_s = 8.0\n"
    write_digits(cluster, place, "downpour", HOSTS + cut, servers=1)
    assert place.dlctl("start", "--no-wait", "job.toml").code == 0
    place.until_step(10, END_S)
    for number, name in enumerate(cluster.names):
        (rank,) = ranks(cluster, name)
        parent = rank.parent()
        assert parent is not None
        assert f"worker-{number}" in parent.cmdline()
    (rank,) = ranks(cluster, "h2")
    rank.kill()
    until_back(place, "worker-1")
    assert rank.pid not in [another.pid for another in ranks(cluster, "h2")]
    cut_and_heal(cluster, place)
    place.until_step(place.run()["step"] + 20, LONG_S)
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code == 0
    place.nothing_left()


def ranks(cluster: Cluster, host: str) -> list[psutil.Process]:
    """The second processes of the replicas there."""
    return [p for p in cluster.processes(host) if "daemons.worker.later_rank" in p.cmdline()]


def test_a_group_that_a_firewall_divides_fails_and_says_where(
    cluster: Cluster, place: Workplace
) -> None:
    write_digits(cluster, place, "allreduce", HOSTS + PRIVATE + IMPATIENT)
    cluster.firewall("h2", ["1024-65535"])
    place.start()
    place.until_state("failed", timeout_s=2 * LONG_S)
    reason = place.run()["reason"]
    assert "could not connect to each other" in reason
    assert "on h2: " in reason
    assert "firewalls" in reason
    place.nothing_left()
