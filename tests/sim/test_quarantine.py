"""A worker that computes what nobody can use is taken out; the others go on without it."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import job_file

from dlctl.messages import Array
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.problems import Batch, LeastSquares
from dlctl.sim.simulation import Simulation

STEPS = ComputeOptions(step_s=0.02)


class BadHost(LeastSquares):
    """What slot 1 computes is of no use: NaN, or finite and far too large."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.is_mended = False

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        loss, gradient = super().gradient(w, batch)
        if batch.slot == 1 and not self.is_mended:
            gradient = np.full_like(gradient, self.value)
        return loss, gradient


@pytest.mark.parametrize(
    ("value", "why"),
    [(np.nan, "not finite for 5 steps in a row"), (1e12, "3 pushes in a row were refused")],
    ids=["nan", "huge"],
)
def test_one_poisoned_worker_is_quarantined_and_the_others_finish(value: float, why: str) -> None:
    job = job_file(workers=3, servers=2, nonfinite_steps_max=5, epochs=40.0)
    outcome = Simulation(job, BadHost(value), compute=STEPS).run()
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    (told,) = outcome.store.texts("quarantine")
    assert told.startswith("worker-1 is quarantined: ")
    assert why in told
    assert outcome.store.daemons["worker-1"]["state"] == "quarantined"
    assert np.isfinite(outcome.weights).all()
    workers = [p for p in outcome.world.processes if p.name == "worker-1"]
    assert len(workers) == 1, "it was not replaced"


def test_a_quarantined_worker_comes_back_when_it_is_asked_for() -> None:
    problem = BadHost(np.nan)
    job = job_file(workers=2, nonfinite_steps_max=5, epochs=400.0)
    simulation = Simulation(job, problem, compute=STEPS)

    def mend() -> None:
        problem.is_mended = True

    simulation.at(3.0, mend)
    simulation.request(3.5, "restart", {"names": ["worker-1"]})
    simulation.request(8.0, "stop", {})
    outcome = simulation.run()
    assert outcome.state == "stopped"
    row = outcome.store.daemons["worker-1"]
    assert (row["incarnation"], row["restarts"], row["error"]) == (2, 1, "")
    assert row["metrics"]["step"] > 50
