"""A run goes on from a checkpoint with other options, workers or servers than it was saved with."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import job_file

from dlctl.records.manifest import state_of
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store
from dlctl.wire.messages import Json

PROBLEM = LeastSquares(samples=256)


def run(name: str, workers: int, epochs: float, store: Store, **options: Any) -> Outcome:
    job = job_file(
        workers, 2, algorithm=(name, options), optimizer=("sgd", {"lr": 0.05}),
        portion_batches=2, epochs=epochs,
    )  # fmt: skip
    outcome = Simulation(job, PROBLEM, store=store).run()
    assert outcome.state == "finished", outcome.reason
    return outcome


@pytest.mark.parametrize("name", ["dc-asgd", "ringleader"])
def test_servers_that_keep_something_of_each_worker_go_on_with_more_of_them(name: str) -> None:
    store = Store()
    before = PROBLEM.evaluate(run(name, 2, 1.0, store).weights)["loss"]
    after = PROBLEM.evaluate(run(name, 4, 3.0, store).weights)["loss"]
    assert after < before


def test_a_buffer_is_as_large_as_the_job_says_now() -> None:
    store = Store()
    run("fedbuff", 2, 1.0, store, buffer_pushes=7, local_steps=2)
    outcome = run("fedbuff", 2, 3.0, store, buffer_pushes=2, local_steps=2)
    shards = outcome.store.manifests[outcome.store.newest()]["shards"]
    assert {shard["state"]["counters"]["capacity"] for shard in shards} == {2}


def manifest(*counters: Json) -> Json:
    shards = [
        {"lo": at, "hi": at + 1, "state": {"counters": each}} for at, each in enumerate(counters)
    ]
    return {"shards": shards}


def test_what_optimisers_count_is_cut_anew_if_it_is_alike() -> None:
    """Numbers of updates may differ: a checkpoint is not of one moment."""
    assert state_of(manifest({"updates": 3}, {"updates": 4}), 0, 2)["counters"] == {"updates": 3}
    unlike = manifest({"buffered": 0}, {"buffered": 1})
    with pytest.raises(ValueError, match="2 servers"):
        state_of(unlike, 0, 2)
    assert state_of(unlike, 1, 2)["counters"] == {"buffered": 1}
