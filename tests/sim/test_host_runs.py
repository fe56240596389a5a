"""A run on three hosts: each has its agent, and any of them may be away, come back, or be lost."""

from __future__ import annotations

import json
import re

import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from dlctl.job.config import Host
from dlctl.roles.protocol.context import COORDINATOR, EXIT_POISONED
from dlctl.sim.checkers import NothingLeft
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Simulation

pytestmark = pytest.mark.long
HOSTS = (Host(ssh="h1"), Host(ssh="h2"), Host(ssh="h3"))
TIMEOUTS = {"silent_s": 3.0, "host_s": 20.0, "grace_s": 20.0}


def on_hosts(hosts=HOSTS, *, servers=2, workers=4, faults=None, seed=0, step_s=0.2) -> Simulation:
    problem = Ledger(shards=servers, samples=512, cells=300)
    job = job_file(
        workers=workers, servers=servers, optimizer=ACCOUNT, batch_size=8, portion_batches=2,
        epochs=2.0, hosts=hosts, timeouts=TIMEOUTS,
    )  # fmt: skip
    return Simulation(
        job, problem, seed=seed, faults=faults or Faults(),
        compute=ComputeOptions(step_s=step_s, spread=0.1),
        checkers=ledger_checkers(problem, 2, once=False, heal_at_s=30.0),
    )  # fmt: skip


def agent_of(simulation: Simulation, name: str) -> str:
    return simulation.world.machine(COORDINATOR).members.daemons[name].agent


def give_up(simulation: Simulation, agent: str) -> None:
    """The checkers do not count who is given up, alive or not: it is fenced when it comes back."""
    for process in simulation.world.processes:
        process.given_up |= process.agent == agent and process.alive


def test_every_host_has_an_agent_that_starts_what_is_placed_there():
    simulation = on_hosts()
    outcome = simulation.run()
    assert outcome.state == "finished"
    hosted = {
        p.name: p.agent for p in outcome.world.processes if p.name[:6] in ("server", "worker")
    }
    assert hosted == {
        "server-0": "agent-1", "server-1": "agent-2",
        "worker-0": "agent-1", "worker-1": "agent-1", "worker-2": "agent-2", "worker-3": "agent-3",
    }  # fmt: skip
    assert not outcome.world.living()


def spread(simulation: Simulation) -> list[int]:
    """How many workers the agents have, agent-0 first."""
    members = simulation.world.machine(COORDINATOR).members
    workers = [worker.agent for worker in members.of_role("worker")]
    return [workers.count(agent.name) for agent in members.of_role("agent")]


@pytest.mark.parametrize("coordinator_dies", [False, True])
def test_a_host_that_all_workers_have_left_gets_its_share_of_those_that_are_added(coordinator_dies):
    simulation = on_hosts(workers=3, servers=1, step_s=0.4)
    found = []
    simulation.request(2.0, "scale", {"workers": 1})
    simulation.at(7.9, lambda: found.append(spread(simulation)))
    if coordinator_dies:
        simulation.at(6.0, lambda: simulation.world.kill(COORDINATOR))
    simulation.request(8.0, "scale", {"workers": 6})
    simulation.at(8.9, lambda: found.append(spread(simulation)))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert found == [[0, 1, 0, 0], [0, 2, 2, 2]]


def test_workers_are_not_added_to_a_host_that_was_given_up():
    simulation = on_hosts(workers=3, servers=1, step_s=0.8)
    found = []
    simulation.at(2.0, lambda: simulation.world.lose_host("agent-3"))
    simulation.request(30.0, "scale", {"workers": 6})
    simulation.at(30.9, lambda: found.append(spread(simulation)))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert found == [[0, 3, 3, 0]]


def test_a_host_for_servers_gets_no_workers_until_no_other_one_is_left():
    hosts = (Host(ssh="h1", servers=2, workers=0), Host(ssh="h2"))
    simulation = on_hosts(hosts, step_s=0.8)
    found = []
    simulation.request(2.0, "scale", {"workers": 5})
    simulation.at(2.9, lambda: found.append(spread(simulation)))
    simulation.at(3.0, lambda: simulation.world.lose_host("agent-2"))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert [*found, spread(simulation)] == [[0, 0, 5], [0, 5, 0]]


@pytest.mark.parametrize("agent", ["agent-1", "agent-3"])
def test_a_host_that_is_cut_off_and_comes_back_loses_nothing(agent):
    simulation = on_hosts()
    simulation.at(2.0, lambda: simulation.world.cut_off(agent))
    simulation.at(12.0, lambda: simulation.world.join(agent))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert not outcome.world.living()


def test_the_workers_of_a_host_that_is_lost_are_started_on_the_others():
    simulation = on_hosts()
    simulation.at(2.0, lambda: simulation.world.lose_host("agent-3"))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert agent_of(simulation, "worker-3") in ("agent-1", "agent-2")
    (again,) = [p for p in outcome.world.processes if str(p) == "worker-3.2"]
    assert json.loads(again.acks), "it works there, and is told so"
    (text,) = (text for text in outcome.store.texts("lost") if "given up" in text)
    assert re.findall(r"\bh3\b|20 s", text) == ["h3", "20 s"]


@pytest.mark.parametrize(
    ("verb", "arguments", "at_the_end"),
    [("restart", {"names": ["worker-3"]}, "stopped"), ("scale", {"workers": 3}, None)],
)
def test_what_was_asked_for_while_a_host_is_away_is_done_when_it_is_given_up(
    verb, arguments, at_the_end
):
    simulation = on_hosts(step_s=0.8)
    simulation.at(2.0, lambda: simulation.world.lose_host("agent-3"))
    client = simulation.request(12.0, verb, arguments)
    outcome = simulation.run()
    assert client.reply is not None
    assert client.reply.error == ""
    assert outcome.state == "finished", outcome.store.texts("state")
    members = simulation.world.machine(COORDINATOR).members.daemons
    assert getattr(members.get("worker-3"), "state", None) == at_the_end


def test_a_quarantined_worker_stays_where_it_is_when_its_host_is_given_up():
    """What it had was poison; that its host is gone, too, is no reason to end the run."""
    simulation = on_hosts(step_s=0.8)

    def poison() -> None:
        worker = simulation.world.process("worker-3")
        worker.exit_code = EXIT_POISONED
        worker.log += b"ERROR not finite for 5 steps in a row\n"
        worker.last_lines.append("ERROR not finite for 5 steps in a row")
        worker.end(EXIT_POISONED)

    simulation.at(2.0, poison)
    simulation.at(4.0, lambda: simulation.world.lose_host("agent-3"))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert outcome.store.daemons["worker-3"]["state"] == "quarantined"
    assert any("given up" in text for text in outcome.store.texts("lost"))


def test_a_host_that_comes_back_after_it_was_given_up_finds_its_place_taken():
    simulation = on_hosts(step_s=0.8)
    simulation.at(2.0, lambda: simulation.world.cut_off("agent-3"))
    simulation.at(22.0, lambda: give_up(simulation, "agent-3"))
    simulation.at(30.0, lambda: simulation.world.join("agent-3"))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert agent_of(simulation, "worker-3") != "agent-3"
    assert not outcome.world.living()


def test_without_the_host_of_a_shard_the_run_ends_and_says_so():
    simulation = on_hosts()
    simulation.at(2.0, lambda: simulation.world.lose_host("agent-2"))
    outcome = simulation.run()
    assert outcome.state == "failed"
    assert outcome.store.texts("state")[-1] == (
        "failed: the host h2 has not been reached for 20 s, and with it server-1: its shard is lost"
    )
    assert not outcome.world.living()


def test_a_run_that_failed_without_a_host_goes_on_with_it_and_all_its_workers():
    """`dlctl recover`, when the host can be reached again."""
    simulation = on_hosts(step_s=0.8)
    simulation.at(2.0, lambda: simulation.world.cut_off("agent-2"))
    every, simulation.checkers = simulation.checkers, []
    assert simulation.run().state == "failed"
    simulation.checkers = every
    simulation.world.join("agent-2")
    simulation.world.restart_coordinator(simulation.world.past)
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert not outcome.world.living()


def test_an_agent_of_another_host_that_dies_is_started_again_and_adopts():
    simulation = on_hosts()
    simulation.at(2.0, lambda: simulation.world.kill("agent-2"))
    outcome = simulation.run()
    assert outcome.state == "finished"
    servers = [p for p in outcome.world.processes if p.name == "server-1"]
    assert len(servers) == 1, "nobody else was ended"


def test_a_coordinator_that_is_started_again_hears_of_all_hosts():
    simulation = on_hosts()
    simulation.at(2.0, lambda: simulation.world.kill(COORDINATOR))
    outcome = simulation.run()
    assert outcome.state == "finished"
    agents = [p for p in outcome.world.processes if p.name.startswith("agent")]
    assert len(agents) == 4, "all went on"


def test_a_host_that_never_could_be_reached_fails_the_start_with_the_words_of_ssh():
    simulation = on_hosts()
    simulation.world.unreachable.add("agent-2")
    outcome = simulation.run()
    assert outcome.state == "failed"
    assert "No route to host" in outcome.store.texts("state")[-1]


def test_a_stop_while_a_host_is_away_does_not_wait_for_its_worker():
    simulation = on_hosts()
    simulation.at(2.0, lambda: simulation.world.cut_off("agent-3"))
    simulation.request(7.0, "stop", {"checkpoint": True, "grace_s": 20.0, "kill": False})
    # What is left there ends by itself, long after this: see `dlctl/roles/protocol/watchdog.py`.
    simulation.checkers = [c for c in simulation.checkers if not isinstance(c, NothingLeft)]
    outcome = simulation.run()
    assert outcome.state == "stopped", outcome.store.texts("state")
    assert outcome.seconds < 15.0
    assert outcome.left_behind == ["agent-3"]


@pytest.mark.parametrize("seed", range(6))
def test_faults_of_all_kinds_on_three_hosts(seed):
    faults = Faults(
        kills=2, server_kills=1, agent_kills=1, coordinator_kills=1, freezes=1, cuts=2,
        partitions=1, half_opens=1, resets=2, heal_at_s=10.0,
    )  # fmt: skip
    outcome = on_hosts(faults=faults, seed=seed).run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert not outcome.world.living()


def test_a_coordinator_that_is_started_again_gives_up_a_host_that_was_lost_before():
    """It has never seen an agent there; what it kills has ended all the same."""
    simulation = on_hosts(step_s=0.8)
    simulation.at(2.0, lambda: simulation.world.lose_host("agent-3"))
    simulation.at(2.5, lambda: simulation.world.kill(COORDINATOR))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert any("given up" in text for text in outcome.store.texts("lost"))
    assert agent_of(simulation, "worker-3") in ("agent-1", "agent-2")
    assert not outcome.world.living()
