"""Decentralised parameter servers: every host with workers serves a part of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from simulated import Noted, job_file

from dlctl.job import config
from dlctl.job.config import Host, JobFile
from dlctl.jobfile import shares
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store

SIZE, ASKED = 3000, 1.1
STEADY = ComputeOptions(step_s=0.2)
TIMEOUTS = {"silent_s": 2.0, "host_s": 5.0}


def job_of(
    hosts: int, *, placement: str = "workers", servers: int = 0, portion: int = 12, **more: Any
) -> JobFile:
    """A worker on each host; servers: a stated number."""
    job = job_file(
        hosts, servers or 1, algorithm=("sync", {}), optimizer=("momentum", {"lr": 0.05}),
        batch_size=8, epochs=1.0,
        hosts=tuple(Host(ssh=f"h{n}") for n in range(hosts)), timeouts=TIMEOUTS, **more,
    )  # fmt: skip
    kind: Any = placement
    job = dataclasses.replace(
        job,
        servers=dataclasses.replace(job.servers, placement=kind),
        data=config.Data(portion_batches=portion, lease_ahead_s=0.0),
    )
    return job if servers else shares.counted(job)


def problem_of(hosts: int, steps: int = 12) -> Noted:
    """One portion for each worker: whoever gets it, its batches are the same."""
    return Noted(samples=hosts * steps * 8, size=SIZE)


def run(job: JobFile, problem: Noted, store: Store | None = None, **faults: Any) -> Outcome:
    simulation = Simulation(job, problem, compute=STEADY, store=store or Store())
    if victim := faults.get("kills"):
        simulation.at(2.0, lambda: simulation.world.kill(victim))
    if agent := faults.get("loses"):
        simulation.at(4.0, lambda: simulation.world.lose_host(agent))
    return simulation.run()


def link_sums(outcome: Outcome) -> dict[str, int]:
    rows = outcome.store.run["links"]
    return {agent: row["out_bytes"] + row["in_bytes"] for agent, row in rows.items()}


@pytest.mark.parametrize("hosts", range(2, 9))
def test_all_links_carry_the_same(hosts: int) -> None:
    outcome = run(job_of(hosts), problem_of(hosts))
    assert outcome.state == "finished", outcome.reason
    sums = list(link_sums(outcome).values())
    assert len(sums) == hosts
    assert max(sums) / np.mean(sums) <= ASKED
    # Each slice but the own one, out and in, at every step and at the beginning and the end.
    of_a_step = 4 * SIZE * (hosts - 1) / hosts
    row = next(iter(outcome.store.run["links"].values()))
    assert 2 * of_a_step * 12 <= row["out_bytes"] <= 2 * of_a_step * 15
    assert 2 * of_a_step * 12 <= row["in_bytes"] <= 2 * of_a_step * 15


def test_one_server_for_all_carries_what_all_others_do_together() -> None:
    job = job_of(4, placement="spread", servers=1)
    sums = link_sums(run(job, problem_of(4)))
    # The worker beside the server uses no link.
    assert sums["agent-1"] == pytest.approx(sum(sums.values()) / 2)


@pytest.mark.parametrize("hosts", [2, 3, 5])
def test_it_ends_where_one_server_for_all_does(hosts: int) -> None:
    """Bit for bit: the shards' sums are in the order of the workers."""
    outcomes = []
    for job in (job_of(hosts), job_of(hosts, placement="spread", servers=1)):
        problem = problem_of(hosts)
        outcome = run(job, problem)
        assert outcome.state == "finished", outcome.reason
        assert [len(problem.rows[slot]) for slot in range(hosts)] == [12] * hosts
        outcomes.append(outcome.weights.tobytes())
    assert outcomes[0] == outcomes[1]


@pytest.mark.long
@pytest.mark.parametrize("victim", ["server-1", COORDINATOR])
def test_links_are_counted_on_after_a_death(victim: str) -> None:
    plain, killed = (run(job_of(3), problem_of(3), kills=who) for who in ("", victim))
    assert killed.state == "finished", killed.reason
    assert plain.weights.tobytes() == killed.weights.tobytes()
    for agent, before in link_sums(plain).items():
        assert before <= link_sums(killed)[agent] <= 1.4 * before


def test_a_lost_host_takes_its_shard_along_and_the_rest_goes_on_from_the_checkpoint() -> None:
    """As any lost server: the run fails by name; without the host it resumes on the others."""
    store, problem = Store(), problem_of(3, 40)
    lost = run(job_of(3, portion=4, checkpoint_s=1.0), problem, store, loses="agent-3")
    assert lost.state == "failed"
    assert "server-2" in lost.reason
    assert any(manifest["step"] for manifest in store.manifests.values())
    left = job_of(2, portion=4)
    assert left.servers.count == 2
    outcome = run(left, problem, store)
    assert outcome.state == "finished", outcome.reason
    assert len(outcome.store.run["shards"]) == 2


def test_weights_are_the_shares_of_the_model() -> None:
    job = job_of(2)
    job = dataclasses.replace(job, servers=dataclasses.replace(job.servers, weights=(3.0, 1.0)))
    outcome = run(job, problem_of(2))
    assert outcome.state == "finished", outcome.reason
    assert outcome.store.run["shards"] == [2250, 750]
    plain = run(job_of(2), problem_of(2))
    assert plain.store.run["shards"] == [1500, 1500]
    assert plain.weights.tobytes() == outcome.weights.tobytes()


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
def test_a_run_resumes_with_other_shares(weights: tuple[float, ...]) -> None:
    store, problem = Store(), problem_of(2)
    first = dataclasses.replace(job_of(2).servers, weights=(3.0, 1.0))
    run(dataclasses.replace(job_of(2), servers=first), problem, store)
    again = dataclasses.replace(
        job_of(2), servers=dataclasses.replace(first, weights=weights),
        job=dataclasses.replace(job_of(2).job, stop=config.Stop(epochs=2.0)),
    )  # fmt: skip
    outcome = run(again, problem, store)
    assert outcome.state == "finished", outcome.reason
    straight = dataclasses.replace(again, servers=job_of(2).servers)
    other_store = Store()
    run(job_of(2), problem_of(2), other_store)
    assert outcome.weights.tobytes() == run(straight, problem_of(2), other_store).weights.tobytes()
