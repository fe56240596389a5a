"""Whole runs of methods without one right result: workers, servers and the coordinator die."""

from __future__ import annotations

from typing import Any

import pytest
from scenarios import COMPUTE, HEAL_AT_S, TIMEOUTS, poor_network, recovery_faults
from simulated import job_file

from dlctl.sim.checkers import (
    AnswersChecker,
    BufferedChecker,
    Checker,
    FetchesChecker,
    LeasesChecker,
    LivenessChecker,
    NothingLeft,
    SamplesChecker,
    TablesChecker,
    TermsChecker,
)
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation

METHODS: dict[str, tuple[dict[str, Any], tuple[type[Checker], ...]]] = {
    "easgd": ({"exchange_every_steps": 3, "inner_lr": 0.1}, ()),
    "fedbuff": ({"local_steps": 2, "buffer_pushes": 3, "inner_lr": 0.1}, (BufferedChecker,)),
}
SEEDS = [range(1), *(pytest.param(range(n, n + 4), marks=pytest.mark.long) for n in (1, 5, 9))]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", METHODS)
def test_a_run_ends_with_a_good_model_whoever_dies(name: str, seeds: range) -> None:
    options, more = METHODS[name]
    problem, epochs = LeastSquares(samples=128), 6
    for seed in seeds:
        faults = recovery_faults(seed)
        job = job_file(
            4, 2, algorithm=(name, options), batch_size=4, portion_batches=2, seed=seed,
            optimizer=("sgd", {"lr": 1.0 if "inner_lr" in options else 0.1}),
            epochs=float(epochs), restarts_max=20, timeouts=TIMEOUTS, checkpoint_s=0.6,
            durability=("process", "disk")[seed % 2],
        )  # fmt: skip
        checkers = (
            TermsChecker(), SamplesChecker(problem.samples, epochs, once=False),
            LeasesChecker(problem.samples, epochs, forgets=bool(faults.full_disks)),
            FetchesChecker(), TablesChecker(), AnswersChecker(), LivenessChecker(HEAL_AT_S),
            NothingLeft(), *(kind() for kind in more),
        )  # fmt: skip
        outcome = Simulation(
            job, problem, seed, network=poor_network(seed), compute=COMPUTE, faults=faults,
            checkers=checkers,
        ).run(200.0)  # fmt: skip
        assert outcome.state == "finished", (seed, outcome.reason)
        loss = problem.evaluate(outcome.weights)["loss"]
        assert loss <= 0.2 * problem.evaluate(problem.initial())["loss"], (seed, loss)
