"""Runs whose workers see the parameters in 16 bits: nothing is lost, and they learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import ACCOUNT, Watcher, job_file, ledger_checkers

from dlctl.compress.values import Precision
from dlctl.shards.base import Shard
from dlctl.shards.summary import Summary
from dlctl.sim.checkers import FetchesChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares, Ledger
from dlctl.sim.simulation import Simulation
from dlctl.wire.messages import Evaluated, Parameters, SparseParameters

PRECISIONS: tuple[Precision, ...] = ("float16", "bfloat16")
RUNS: dict[str, dict[str, Any]] = {
    "downpour": {
        "algorithm": ("downpour", {}), "optimizer": ("adagrad", {"lr": 0.5}),
        "fetch_values": "float16",
    },
    "downpour, sparse": {
        "algorithm": ("downpour", {"inner_lr": 0.0}), "optimizer": ("adagrad", {"lr": 0.5}),
        "compression": ("topk", {"density": 0.02}), "fetch_values": "bfloat16",
        "durability": "disk",
    },
    "sync": {
        "algorithm": ("sync", {}), "optimizer": ("sgd", {"lr": 0.1}), "fetch_values": "bfloat16",
    },
    "local-sgd": {
        "algorithm": ("local-sgd", {"local_steps": 4, "inner_lr": 0.05}),
        "optimizer": ("sgd", {"lr": 1.0}), "fetch_values": "float16", "durability": "disk",
    },
}  # fmt: skip
BAD = NetworkOptions(link=SimLink(jitter_s=0.002, loss=0.05, duplicate=0.05, reorder=0.05))
TIMEOUTS = {"resend_s": 0.3}


@pytest.mark.long
@pytest.mark.per_commit(2)
@pytest.mark.parametrize("method", RUNS)
def test_a_run_that_loses_messages_and_servers_still_finds_the_solution(method: str) -> None:
    is_sparse = "sparse" in method
    problem, fetches = LeastSquares(samples=512, size=200 if is_sparse else 40), FetchesChecker()
    answers = Watcher(Parameters, SparseParameters)
    job = job_file(workers=3, servers=2, epochs=16.0, timeouts=TIMEOUTS, **RUNS[method])
    faults = Faults(server_kills=2, kills=1, from_s=1.0, heal_at_s=6.0)
    simulation = Simulation(
        job, problem, 1, network=BAD, faults=faults, compute=ComputeOptions(step_s=0.02),
        checkers=(fetches, answers),
    )  # fmt: skip
    outcome = simulation.run(300.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    assert simulation.injector.struck["kill"] == 3
    assert 2 in {answer.values.itemsize for answer in answers.messages()}
    assert (fetches.sparse > fetches.whole) == is_sparse
    assert np.abs(outcome.weights - problem.solution).mean() < 0.05


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("durability", ["none", "process", "disk"])
def test_no_push_is_lost_or_counts_twice(durability: Any, precision: Precision) -> None:
    problem = Ledger(shards=2, cells=300)
    job = job_file(
        3, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=6.0, checkpoint_s=0.5,
        compression=("topk", {"density": 0.005}), fetch_values=precision, durability=durability,
        timeouts=TIMEOUTS,
    )  # fmt: skip
    kills = {"server_kills": 2} if durability != "none" else {"kills": 2}
    outcome = Simulation(
        job, problem, 2, network=BAD, compute=ComputeOptions(step_s=0.1),
        faults=Faults(**kills, from_s=1.0, heal_at_s=3.0),
        checkers=ledger_checkers(problem, 6, once=False, heal_at_s=3.0),
    ).run(100.0)  # fmt: skip
    assert outcome.state == "finished", outcome.reason


@pytest.mark.long
def test_what_rounding_takes_away_is_not_lost_to_who_learns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same run without it ends several times as far from the solution."""

    def run() -> float:
        problem = LeastSquares(samples=64, noise=0.0)
        job = job_file(
            epochs=150.0, batch_size=32, optimizer=("sgd", {"lr": 0.05}), algorithm=("sync", {}),
            fetch_values="bfloat16",
        )  # fmt: skip
        weights = Simulation(job, problem).run().weights
        return float(np.abs(weights - problem.solution).mean())

    advance, kept = Summary._advance, run()

    def forget_and_advance(self: Summary, shard: Shard) -> bool:
        self._rest = np.zeros_like(self._rest)
        return advance(self, shard)

    monkeypatch.setattr(Summary, "_advance", forget_and_advance)
    assert kept < run() / 2


def test_what_is_evaluated_at_the_end_is_what_is_saved() -> None:
    problem, watcher = LeastSquares(), Watcher(Evaluated)
    job = job_file(workers=2, fetch_values="bfloat16", epochs=3.0, evaluate_epochs=1.0)
    outcome = Simulation(job, problem, checkers=(watcher,)).run()
    assert watcher.messages()[-1].metrics == problem.evaluate(outcome.weights)
