"""One model for all workers of a host, in whole runs: who dies takes nothing of it along."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from simulated import job_file

from dlctl.roles.coordinator.supervision.groups import LOST
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.sim.store import Store


def simulated(workers: int = 3, store: Store | None = None, **job: Any) -> Simulation:
    options = {"inner_lr": 0.05, "steps_at_once": 4, **job.pop("options", {})}
    wanted = {"epochs": 40.0, "portion_batches": 8, "batch_size": 4} | job
    return Simulation(
        job_file(workers, 0, algorithm=("hogwild", options), **wanted), LeastSquares(samples=128),
        compute=ComputeOptions(step_s=0.1), store=store,
    )  # fmt: skip


def loss(weights: Any) -> float:
    return float(LeastSquares(samples=128).evaluate(np.asarray(weights))["loss"])


def test_all_workers_step_in_one_model_and_each_portion_is_done_once():
    outcome = simulated().run()
    assert outcome.state == "finished", outcome.reason
    world = outcome.world
    models = [world.machine(f"worker-{slot}").training.side.parameters for slot in range(3)]
    assert all(model is models[0] for model in models)
    assert world.shared_models.made == 1
    assert loss(outcome.weights) < 0.01 * loss(LeastSquares(samples=128).initial())


@pytest.mark.parametrize("victims", [("worker-0",), ("worker-1", "worker-0"), ("coordinator",)])
def test_who_comes_back_finds_the_model_as_it_is(victims: tuple[str, ...]):
    simulation = simulated(2, epochs=400.0)
    world, losses = simulation.world, list[float]()
    for at_s, victim in enumerate(victims):
        simulation.at(5.0 + 5.0 * at_s, partial(world.kill, victim))
    for at_s in np.arange(4.9, 15.0, 0.05):
        simulation.at(float(at_s), lambda: losses.append(loss(world.weights())))
    simulation.request(16.0, "stop", {"checkpoint": True, "grace_s": 30.0})
    assert simulation.run().state == "stopped"
    assert world.shared_models.made == 1
    assert max(losses) < 0.1 * loss(LeastSquares(samples=128).initial())


def test_when_all_have_died_the_run_fails_and_goes_on_from_its_checkpoint():
    simulation = simulated(2, epochs=400.0, checkpoint_s=2.0)
    world = simulation.world
    for slot in range(2):
        simulation.at(9.0, partial(world.kill, f"worker-{slot}"))
    outcome = simulation.run()
    assert (outcome.state, outcome.reason) == ("failed", LOST)
    again = simulated(2, outcome.store, epochs=400.0)
    weights: list[Any] = []
    again.at(2.0, lambda: weights.append(again.world.weights()))
    again.request(2.5, "stop", {"checkpoint": False, "grace_s": 30.0})
    assert again.run().state == "stopped"
    assert again.world.shared_models.made == 1
    assert loss(weights[0]) < 0.1 * loss(LeastSquares(samples=128).initial())


def test_a_worker_without_anything_to_restore_waits_for_those_that_restore():
    """More workers than there were: one of the new ones may make the memory."""
    stopped = simulated(2, epochs=20.0).run()
    assert stopped.state == "finished", stopped.reason
    again = simulated(4, stopped.store, epochs=400.0)
    seen: list[Any] = []
    again.at(1.5, lambda: seen.append(again.world.weights()))
    again.request(3.0, "stop", {"checkpoint": False, "grace_s": 30.0})
    outcome = again.run()
    assert outcome.state == "stopped", outcome.reason
    assert all(again.world.machine(f"worker-{slot}").training.writing.steps for slot in range(4))
    assert loss(seen[0]) <= 2 * loss(stopped.weights)
