"""The moving average of a run's parameters: whoever dies, and however the shards are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import job_file, rows_in_order

from dlctl.job.config import Average
from dlctl.model.flat import slice_bounds
from dlctl.roles.protocol.effects import RunEvaluation
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Batch, LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store
from dlctl.util.names import AVERAGE

SAMPLES, EMA, LR = 256, 0.9, 0.05


class Looks(Checker):
    """What was evaluated last."""

    def on_effect(self, process: Any, effect: Any) -> None:
        if isinstance(effect, RunEvaluation):
            self.parameters = effect.parameters.copy()


def by_hand(epochs: int) -> tuple[np.ndarray, np.ndarray]:
    """(the parameters, their average) of one worker with the batches of all."""
    problem = LeastSquares(samples=SAMPLES)
    w = problem.initial().astype(np.float64)
    average = w.copy()
    for number, rows in enumerate(rows_in_order(job_file(batch_size=32), SAMPLES, epochs)):
        w -= LR * problem.gradient(w.astype(np.float32), Batch(rows, 0, 1, number))[1]
        average = EMA * average + (1 - EMA) * w
    return w, average


def run(store: Store, servers: int, epochs: int, victim: str = "") -> tuple[Outcome, np.ndarray]:
    """How it ended, and what was evaluated then."""
    job = job_file(
        4, servers, batch_size=8, portion_batches=1, epochs=float(epochs), algorithm=("sync", {}),
        optimizer=("sgd", {"lr": LR}), average=Average(ema=EMA, evaluate=True),
    )  # fmt: skip
    looks = Looks()
    compute = ComputeOptions(step_s=0.1)
    simulation = Simulation(
        job, LeastSquares(samples=SAMPLES), store=store, compute=compute, checkers=(looks,)
    )
    if victim:
        simulation.at(3.0, lambda: simulation.world.kill(victim))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    return outcome, looks.parameters


@pytest.mark.long
@pytest.mark.parametrize("victim", ["", "server-1"])
def test_it_is_evaluated_saved_and_gone_on_with(victim: str) -> None:
    store = Store()
    for servers, epochs in ((3, 4), (2, 6)):
        outcome, evaluated = run(store, servers, epochs, victim)
        parameters, average = by_hand(epochs)
        kept = [
            outcome.world.machine(f"server-{i}").serving.shard.slots[AVERAGE]
            for i in range(servers)
        ]
        assert np.allclose(outcome.weights, parameters, rtol=0, atol=1e-5)
        assert np.allclose(np.concatenate(kept), average, rtol=0, atol=1e-5)
        assert np.array_equal(evaluated, np.concatenate(kept))
        assert not np.allclose(evaluated, outcome.weights, rtol=0, atol=1e-3)
        assert [part.size for part in kept] == [
            hi - lo for lo, hi in (slice_bounds(average.size, servers, i) for i in range(servers))
        ]
