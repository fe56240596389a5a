"""The run's time series: a coordinator that takes another's place counts on from where that was."""

from __future__ import annotations

from itertools import pairwise

import pytest
from simulated import job_file

from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation


@pytest.mark.parametrize("dies", ["coordinator", "worker-1"])
def test_the_totals_of_a_run_are_what_its_workers_have_done(dies: str) -> None:
    job, compute = job_file(workers=2, seconds=20.0), ComputeOptions(step_s=0.2)
    simulation = Simulation(job, LeastSquares(), compute=compute)
    simulation.at(8.0, lambda: simulation.world.kill(dies))
    outcome = simulation.run()
    rows = [values for _, name, _, values in outcome.store.metrics if name == "run"]
    assert 15 <= len(rows) <= 22, "one a second"
    for counter in ("seconds", "samples", "push_bytes", "pushes"):
        assert all(before[counter] <= after[counter] for before, after in pairwise(rows))
    totals = outcome.store.run["totals"]
    assert 16.0 < totals["seconds"] <= 20.5
    if dies == "coordinator":
        done = [outcome.store.daemons[f"worker-{slot}"]["metrics"] for slot in range(2)]
        assert totals["pushes"] == sum(metrics["pushes"] for metrics in done) > 0
        assert totals["push_bytes"] == sum(metrics["push_bytes"] for metrics in done)
        assert totals["staleness_sum"] == sum(metrics["staleness_sum"] for metrics in done)


def test_a_run_of_less_than_a_second_has_a_row_with_all_that_it_has_done() -> None:
    compute = ComputeOptions(step_s=0.001)
    outcome = Simulation(job_file(workers=2, epochs=2.0), LeastSquares(), compute=compute).run()
    rows = [(step, row) for _, name, step, row in outcome.store.metrics if name == "run"]
    step, last = rows[-1]
    run = outcome.store.run
    assert step == run["step"] == 64
    assert (last["samples"], last["loss"], last["seconds"]) == (
        run["samples"], run["loss"], run["totals"]["seconds"],
    )  # fmt: skip
