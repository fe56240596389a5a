"""The bandwidths of hosts, by how long pushes took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.training.bandwidths import KEPT, Bandwidths, Flight, leaving
from dlctl.roles.worker.flights import Flights
from dlctl.util.names import FLIGHTS


def daemon(name: str, agent: str, incarnation: int = 1) -> Daemon:
    role, _, index = name.partition("-")
    made = Daemon(name, role, int(index), agent, incarnation)
    made.restore_state("running")
    return made


class Hosts:
    def __init__(self, **agents: str) -> None:
        """agents: of daemons, "worker_0" for worker-0."""
        named = {name.replace("_", "-"): agent for name, agent in agents.items()}
        self.daemons = {name: daemon(name, agent) for name, agent in named.items()}
        members: Any = SimpleNamespace(get=self.daemons.get)
        self.bandwidths = Bandwidths(members)

    def report(self, worker: str, number: int, of: Any) -> None:
        self.bandwidths.count(self.daemons[worker], {FLIGHTS: [number, of]})

    def reports(self, worker: str, of: dict[str, list[float]], count: int = KEPT) -> None:
        for number in range(count):
            self.report(worker, number, of)


def test_a_slow_server_has_the_sum_of_what_comes_to_it() -> None:
    hosts = Hosts(worker_0="a", worker_1="b", server_0="c", server_1="d")
    for worker in ("worker-0", "worker-1"):
        hosts.reports(worker, {"server-0": [1000, 2.0], "server-1": [1000, 20.0]})
    found = hosts.bandwidths.of_agents()
    assert found["c"] == pytest.approx(1000)
    assert found["d"] == pytest.approx(100)
    assert found["a"] == pytest.approx((1000 + 100) / 2)


def test_what_leaves_together_adds_up_until_the_first_has_arrived() -> None:
    assert leaving([Flight(1000, 1.0), Flight(1000, 10.0)]) == pytest.approx(1100)
    assert leaving([Flight(1000, 2.0)]) == 500


def test_traffic_within_a_host_is_on_no_link() -> None:
    hosts = Hosts(worker_0="a", server_0="a", server_1="b")
    hosts.reports("worker-0", {"server-0": [1000, 0.001], "server-1": [1000, 1.0]})
    assert hosts.bandwidths.of_agents() == {"a": 1000, "b": 1000}


def test_nothing_is_known_before_some_writes_and_all_of_it_after_a_cut() -> None:
    hosts = Hosts(worker_0="a", server_0="b")
    hosts.reports("worker-0", {"server-0": [1000, 1.0]}, KEPT - 1)
    assert hosts.bandwidths.of_agents() == {}
    hosts.reports("worker-0", {"server-0": [1000, 1.0]}, KEPT)
    assert hosts.bandwidths.of_agents() == {"a": 1000, "b": 1000}
    hosts.bandwidths.cut_anew()
    assert hosts.bandwidths.of_agents() == {"a": 1000, "b": 1000}
    hosts.reports("worker-0", {"server-0": [1000, 2.0]}, KEPT)
    assert hosts.bandwidths.of_agents() == {"a": 500, "b": 500}


@pytest.mark.parametrize(
    "reported",
    [
        None, [], [1], [1, 2], ["x", {}], [1.5, {"server-0": [1, 1.0]}], [1, {"server-0": [1]}],
        [1, {"server-0": [1, 0.0]}], [1, {"server-0": [1, float("nan")]}],
        [1, {"server-0": ["1", 1.0]}], [1, {"server-9": [1, 1.0]}],
        [1, {f"server-{n}": [1, 1.0] for n in range(1000)}],
    ],
)  # fmt: skip
def test_what_is_no_flight_is_ignored(reported: Any) -> None:
    hosts = Hosts(worker_0="a", server_0="b")
    for _ in range(2 * KEPT):
        hosts.bandwidths.count(hosts.daemons["worker-0"], {FLIGHTS: reported})
    assert hosts.bandwidths.of_agents() == {}


def test_a_worker_reports_the_newest_write_of_which_all_has_arrived() -> None:
    flights = Flights()
    flights.arrived("server-0", 20_000, 1.0, 1.5)
    flights.arrived("server-1", 30_000, 1.0, 2.0)
    assert flights.report() == {}
    flights.arrived("server-0", 20_000, 3.0, 3.5)
    assert flights.report() == {
        FLIGHTS: [1, {"server-0": [20_000, 0.5], "server-1": [30_000, 1.0]}]
    }
