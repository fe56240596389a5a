"""Runs with backup workers: what is dropped is not trained, and what is trained is counted."""

from __future__ import annotations

import pytest
from simulated import Watcher, job_file

from dlctl.sim.checkers import LivenessChecker, NothingLeft, SamplesChecker, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.wire import messages as m

SAMPLES, EPOCHS = 192, 4


@pytest.mark.long
@pytest.mark.parametrize("backups", [0, 1])
def test_the_run_counts_the_samples_that_the_servers_have_trained_with(backups: int) -> None:
    """Of three workers one takes three times as long; a coordinator that dies knows the figures."""
    watcher = Watcher(m.Decided)
    simulation = Simulation(
        job_file(
            3, 2, algorithm=("sync", {"backup_workers": backups}), batch_size=4, portion_batches=2,
            epochs=float(EPOCHS),
        ),
        LeastSquares(samples=SAMPLES),
        compute=ComputeOptions(step_s=0.1, spread=0.2, slow={2: 3.0}),
        checkers=(
            TermsChecker(), SamplesChecker(SAMPLES, EPOCHS, once=True), LivenessChecker(0.0),
            NothingLeft(), watcher,
        ),
    )  # fmt: skip
    simulation.at(3.0, lambda: simulation.world.kill("coordinator"))
    outcome = simulation.run(200.0)
    assert outcome.state == "finished", outcome.reason
    run = simulation.world.store.run
    trained = {simulation.world.machine(f"server-{n}").serving.shard.samples for n in range(2)}
    assert trained == {run["samples"]}
    if not backups:
        assert run["samples"] == SAMPLES * EPOCHS
        assert watcher.sent == []
        assert "method" not in run
        return
    assert 0.5 * SAMPLES * EPOCHS < run["samples"] < SAMPLES * EPOCHS
    counted = [run["method"][f"worker-{slot} counted"] for slot in range(3)]
    assert min(counted[:2]) > 0.8
    assert counted[2] < 0.5
