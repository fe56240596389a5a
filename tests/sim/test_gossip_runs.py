"""Gossip in whole runs: nobody waits, and the mean of all replicas is the run's model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import Watcher, job_file

from dlctl.roles.coordinator.supervision.groups import LOST
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.wire import messages as m


def simulated(*checkers: Any, workers: int = 4, latency_s: float = 0.01, **job: Any) -> Simulation:
    options = {"inner_lr": 0.05, **job.pop("options", {})}
    wanted = {"epochs": 20.0, "portion_batches": 1} | job
    return Simulation(
        job_file(workers, 0, algorithm=("gossip", options), **wanted), LeastSquares(samples=128),
        compute=ComputeOptions(step_s=0.1), checkers=checkers,
        network=NetworkOptions(link=SimLink(latency_s=latency_s)),
    )  # fmt: skip


def steps_of(simulation: Simulation) -> list[int]:
    return [simulation.world.machine(f"worker-{slot}").training.side.steps for slot in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["pull", "push", "symmetric"])
def test_nobody_waits_for_one_that_stands_still(mode):
    """Ten seconds of one worker; the others make as many steps in them as in the ten before."""
    simulation = simulated(options={"mode": mode}, epochs=1000.0)
    world, seen = simulation.world, {}
    for at_s in (5.0, 15.0, 25.0):
        simulation.at(at_s, lambda at_s=at_s: seen.update({at_s: steps_of(simulation)}))  # type: ignore[misc]
    simulation.at(15.0, lambda: world.freeze("worker-3"))
    simulation.at(24.9, lambda: world.thaw("worker-3"))
    simulation.request(27.0, "stop", {"checkpoint": False, "grace_s": 30.0})
    assert simulation.run().state == "stopped"
    before, during = (np.subtract(seen[b], seen[a]) for a, b in ((5.0, 15.0), (15.0, 25.0)))
    assert (during[:3] > 0.95 * before[:3]).all(), (before, during)
    assert during[3] < 0.2 * before[3]


def test_the_mean_is_evaluated_with_how_far_the_replicas_are_from_it():
    evaluated = Watcher(m.Evaluated)
    outcome = simulated(evaluated, options={"contact_every_steps": 4}, evaluate_epochs=1.0).run()
    assert outcome.state == "finished", outcome.reason
    models = [
        outcome.world.machine(f"worker-{slot}").training.side.parameters.astype(np.float64)
        for slot in range(4)
    ]
    mean = np.mean(models, axis=0)
    distance = np.sqrt(np.mean([np.sum((model - mean) ** 2) for model in models]))
    problem, last = LeastSquares(samples=128), evaluated.messages()[-1]
    assert last.method == {"consensus_distance": pytest.approx(distance, rel=1e-3), "replicas": 4.0}
    expected = problem.evaluate(mean.astype("f4"))
    assert last.metrics == pytest.approx(expected, rel=1e-3)
    assert evaluated.messages()[0].method["consensus_distance"] > 10 * distance > 0
    assert outcome.store.run["evaluation"] == last.metrics
    assert outcome.store.run["method"] == last.method


@pytest.mark.parametrize("latency_s", [0.01, 0.3])
def test_who_comes_back_begins_with_the_model_of_another_one(latency_s):
    problem = LeastSquares(samples=128)
    simulation = simulated(epochs=200.0, latency_s=latency_s)
    world, losses = simulation.world, list[float]()

    def look() -> None:
        training = getattr(world.machine("worker-2"), "training", None)
        if training is not None and training.has_model():
            losses.append(float(problem.evaluate(training.side.parameters)["loss"]))

    simulation.at(12.0, lambda: world.kill("worker-2"))
    for at_s in np.arange(12.5, 18.0, 0.01):
        simulation.at(float(at_s), look)
    simulation.request(20.0, "stop", {"checkpoint": True, "grace_s": 30.0})
    outcome = simulation.run()
    assert outcome.state == "stopped", outcome.reason
    begun = float(problem.evaluate(problem.initial())["loss"])
    assert losses
    assert max(losses) < 0.5 * begun


@pytest.mark.parametrize("mode", ["pull", "push", "symmetric"])
def test_answers_that_come_many_steps_late_ruin_nothing(mode):
    wanted = {"epochs": 40.0, "latency_s": 0.4, "portion_batches": 16}
    outcome = simulated(options={"mode": mode}, **wanted).run()
    assert outcome.state == "finished", outcome.reason
    sides = [outcome.world.machine(f"worker-{slot}").training.side for slot in range(4)]
    if mode != "push":
        assert max(side.age for side in sides) > 3
    problem = LeastSquares(samples=128)
    assert max(problem.evaluate(side.parameters)["loss"] for side in sides) < 1e-2


def test_a_run_of_which_all_replicas_die_fails_and_says_why():
    simulation = simulated(epochs=1000.0)
    for slot in range(4):
        simulation.at(5.0, lambda slot=slot: simulation.world.kill(f"worker-{slot}"))  # type: ignore[misc]
    outcome = simulation.run()
    assert (outcome.state, outcome.reason) == ("failed", LOST)
    assert outcome.seconds < 10.0
