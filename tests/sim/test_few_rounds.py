"""A run of too few rounds for its momentum says so when its workers begin, and as a problem."""

from __future__ import annotations

import pytest
from simulated import job_file

from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation

OUTER = ("momentum", {"lr": 0.7, "momentum": 0.84, "nesterov": True})
"""Eleven rounds are enough for it."""


@pytest.mark.parametrize(("epochs", "rounds"), [(2.0, 8), (4.0, None)])
def test_it_is_known_when_the_dataset_is(epochs: float, rounds: int | None) -> None:
    """256 samples; a round has 2 workers, 2 steps and batches of 16."""
    options = {"local_steps": 2, "inner_lr": 0.01}
    job = job_file(2, algorithm=("diloco", options), optimizer=OUTER, batch_size=16, epochs=epochs)
    problem = LeastSquares(samples=256)
    simulation = Simulation(job, problem, compute=ComputeOptions(step_s=0.05))
    outcome = simulation.run(600.0)
    assert outcome.state == "finished"
    told = outcome.store.texts("rounds")
    assert len(told) == (rounds is not None)
    assert all(f" {rounds} rounds" in text and "local_steps = 1" in text for text in told)
    codes = [problem["code"] for problem in outcome.store.run["problems"]]
    assert codes == ["rounds-few"] * len(told)
