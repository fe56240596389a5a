"""A run goes on from a checkpoint with all tables, on another number of servers, here or away."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import job_file

from dlctl.job.config import Host
from dlctl.sim.checkers.tables import TablesChecker
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store

SAMPLES, SLOTS, WORKERS = 256, 64, 3
HOSTS = (Host(ssh="h1", servers=1, workers=2), Host(ssh="h2"))


def run(
    store: Store, method: str, *, servers: int, epochs: int, hosts: tuple[Host, ...] = ()
) -> Outcome:
    job = job_file(
        workers=WORKERS, servers=servers, algorithm=(method, {}), batch_size=8, portion_batches=2,
        epochs=float(epochs), hosts=hosts, durability="disk",
    )  # fmt: skip
    # Of what is in a checkpoint nobody has seen the pushes.
    checkers = (TablesChecker(),) if epochs == 1 else ()
    outcome = Simulation(job, LeastSquares(samples=SAMPLES), store=store, checkers=checkers).run()
    assert outcome.state == "finished", outcome.reason
    return outcome


def table(outcome: Outcome, number: int, servers: int) -> list[float]:
    """All of a table, of the servers of the end."""
    servings = [outcome.world.machine(f"server-{i}").serving for i in range(servers)]
    return np.concatenate([serving.tables[number].shard.w for serving in servings]).tolist()


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("hosts", [(), HOSTS], ids=["here", "away"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 3), (3, 2)])
def test_every_sample_is_counted_once_over_two_runs(before, after, hosts) -> None:
    """Each push to the parameters has one to the table, which has a cell for all samples."""
    store = Store()
    first = run(store, "toy-table", servers=before, epochs=1, hosts=hosts)
    cells = table(first, 1, before)
    assert (cells[SLOTS], sum(cells[:SLOTS])) == (SAMPLES, SAMPLES)
    second = run(store, "toy-table", servers=after, epochs=3, hosts=hosts)
    cells = table(second, 1, after)
    assert (cells[SLOTS], sum(cells[:SLOTS])) == (3 * SAMPLES, 3 * SAMPLES)
    versions = [second.world.machine(f"server-{i}").serving.shard.version for i in range(after)]
    assert versions == [3 * SAMPLES / 8] * after


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1)])
def test_what_was_buffered_goes_on_from_a_checkpoint(before, after) -> None:
    store = Store()
    first = run(store, "toy-buffer", servers=before, epochs=1)
    second = run(store, "toy-buffer", servers=after, epochs=2)
    for outcome, servers, epochs in ((first, before, 1), (second, after, 2)):
        for index in range(servers):
            counters = outcome.world.machine(f"server-{index}").serving.shard.optimizer.counters
            assert 4 * counters["steps"] + counters["buffered"] == epochs * SAMPLES / 8
