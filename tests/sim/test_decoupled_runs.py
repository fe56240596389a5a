"""Whole runs of Decoupled DiLoCo: who is slow or dies stops nobody."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import job_file

from dlctl.sim.checkers import LivenessChecker, NothingLeft, SamplesChecker, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Outcome, Simulation

SAMPLES, EPOCHS = 192, 6


def simulate(slow: float, **options: Any) -> Simulation:
    """Three replicas, of which the last one takes `slow` times as long for a step."""
    method = {"local_steps": 12, "fragments": 3, "inner_lr": 0.1, **options}
    job = job_file(
        3, 2, algorithm=("decoupled-diloco", method), optimizer=("sgd", {"lr": 1.0}),
        batch_size=4, portion_batches=2, epochs=float(EPOCHS), restarts_max=5,
    )  # fmt: skip
    return Simulation(
        job, LeastSquares(samples=SAMPLES), 1,
        compute=ComputeOptions(step_s=0.1, spread=0.2, slow={2: slow}),
        checkers=(
            TermsChecker(), SamplesChecker(SAMPLES, EPOCHS, once=False), LivenessChecker(0.0),
            NothingLeft(),
        ),
    )  # fmt: skip


def finished(simulation: Simulation) -> Outcome:
    outcome = simulation.run(300.0)
    assert outcome.state == "finished", outcome.reason
    problem = LeastSquares(samples=SAMPLES)
    first = problem.evaluate(problem.initial())["loss"]
    assert problem.evaluate(outcome.weights)["loss"] <= 0.2 * first
    return outcome


@pytest.mark.long
def test_a_slow_replica_does_not_stop_the_others_and_its_steps_count() -> None:
    took_s = {}
    for quorum in (2, 3):
        simulation = simulate(6.0, quorum=quorum)
        took_s[quorum] = finished(simulation).seconds
        run = simulation.world.store.run
        trained = {simulation.world.machine(f"server-{n}").serving.shard.samples for n in range(2)}
        assert trained == {run["samples"]} == {SAMPLES * EPOCHS}
        if quorum == 2:
            assert run["method"]["worker-0 counted"] > 0.8
            assert 0.05 < run["method"]["worker-2 counted"] < 0.6
    assert took_s[2] < 0.6 * took_s[3]


@pytest.mark.long
@pytest.mark.parametrize("name", ["worker-0", "coordinator", "server-1"])
def test_a_death_stops_nobody(name: str) -> None:
    simulation = simulate(2.0, quorum=1)
    simulation.at(3.0, lambda: simulation.world.kill(name))
    finished(simulation)
    assert simulation.world.store.run["samples"] == SAMPLES * EPOCHS
