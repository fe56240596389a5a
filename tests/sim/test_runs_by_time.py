"""Runs that end after so many seconds."""

from __future__ import annotations

import pytest

from dlctl.job import config
from dlctl.job.config import Choice, JobFile
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation


@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.3, 0.7])
def test_a_run_is_over_at_its_deadline_however_that_is_rounded(seconds: float) -> None:
    """The difference of the deadline and the beginning may be less than the seconds between."""
    for seed in range(3):
        job = JobFile(
            job=config.Job(name="timed", task="none", stop=config.Stop(seconds=seconds)),
            algorithm=Choice(name="downpour", options={}),
            optimizer=Choice(name="sgd", options={"lr": 0.01}),
            workers=config.Workers(count=2, batch_size=16),
            checkpoints=config.Checkpoints(every_s=0.0),
        )
        outcome = Simulation(job, LeastSquares(samples=64, size=8), seed).run(60.0)
        assert (outcome.state, outcome.reason) == ("finished", f"{seconds:g} seconds are over")
