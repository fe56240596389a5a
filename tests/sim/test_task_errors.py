"""What the task raises in one worker costs the run that worker; what it raises in all ends it."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import job_file

from dlctl.errors import JobFailed
from dlctl.records.manifest import FAILURE
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Batch, LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire.messages import Array, Json

STEPS = ComputeOptions(step_s=0.05)
SAMPLES = 256
TORN = "task.loss raised KeyError: 'size' (/home/me/train.py:7)"
METHODS = [
    ("downpour", {}, 1), ("sync", {}, 1), ("local-sgd", {}, 1), ("gossip", {}, 0),
    ("allreduce", {}, 0),
]  # fmt: skip
every_method = pytest.mark.parametrize("method", METHODS, ids=[name for name, *_ in METHODS])


class Raises(LeastSquares):
    """loss() raises in the workers of some slots, from a batch on, or for one sample."""

    def __init__(self, *slots: int, first: int = 10, sample: int = -1) -> None:
        super().__init__(samples=SAMPLES)
        self.slots = slots
        self.first = first
        self.sample = sample
        self.text = TORN

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        is_bad = batch.slot in self.slots and batch.number >= self.first
        if is_bad or self.sample in batch.rows:
            raise JobFailed(self.text.format(batch))
        return super().gradient(w, batch)


def simulated(
    problem: Raises, method: tuple[str, dict[str, object], int] = METHODS[0], workers: int = 3,
    epochs: float = 8.0,
) -> Simulation:  # fmt: skip
    name, options, servers = method
    job = job_file(workers, servers, algorithm=(name, options), epochs=epochs)
    return Simulation(job, problem, compute=STEPS)


def states(outcome: Outcome) -> list[str]:
    rows = outcome.store.daemons
    return [rows[name]["state"] for name in sorted(rows) if name.startswith("worker")]


def processes(outcome: Outcome) -> list[str]:
    return sorted(str(p) for p in outcome.world.processes if p.name.startswith("worker"))


@pytest.mark.per_commit(3)
@every_method
def test_the_others_finish_what_one_worker_cannot_do(method) -> None:
    outcome = simulated(Raises(1), method).run(600.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    assert processes(outcome) == ["worker-0.1", "worker-1.1", "worker-2.1"]
    assert outcome.store.texts("quarantine") == [f"worker-1 is quarantined: {TORN}"]


@pytest.mark.per_commit(2)
@every_method
def test_what_all_raise_ends_the_run_at_once_and_saves_it(method) -> None:
    simulation = simulated(Raises(0, 1, 2, 3, first=40), method, workers=4)
    outcome = simulation.run(600.0)
    assert (outcome.state, outcome.left_behind) == ("failed", [])
    names, error = outcome.reason.split(": ", 1)
    assert (len(names.split(", ")), error) == (2, TORN)
    assert outcome.seconds < 10.0
    assert len(processes(outcome)) == 4, "nobody is restarted"
    if method[2]:
        (manifest,) = outcome.store.manifests.values()
        assert manifest["step"] > 0
        assert manifest[FAILURE] == outcome.reason


@pytest.mark.per_commit(2)
@every_method
def test_a_sample_that_nobody_can_take_ends_the_run_and_what_was_learned_is_saved(method) -> None:
    """It is in the portion that the dead worker has left; also if only two workers have the
    model.
    """
    late = int(np.random.default_rng([0, 0]).permutation(SAMPLES)[200])
    outcome = simulated(Raises(sample=late), method, workers=2).run(600.0)
    assert (outcome.state, outcome.left_behind) == ("failed", [])
    assert outcome.reason.endswith(f": {TORN}")
    assert outcome.store.manifests, "so the model is there"
    assert max(manifest["step"] for manifest in outcome.store.manifests.values()) > 0


def test_an_only_worker_ends_the_run_with_its_error() -> None:
    outcome = simulated(Raises(0), workers=1).run(600.0)
    assert (outcome.state, outcome.reason) == ("failed", f"worker-0: {TORN}")


class EvaluatesNothing(LeastSquares):
    """evaluate() raises the first so many times."""

    def __init__(self, times: float) -> None:
        super().__init__(samples=SAMPLES)
        self.times = times

    def evaluate(self, w: Array) -> Json:
        self.times -= 1
        if self.times >= 0:
            raise JobFailed(TORN)
        return super().evaluate(w)


@pytest.mark.parametrize("at_end", [False, True])
def test_what_evaluate_raises_in_two_workers_ends_the_run_at_once(at_end: bool) -> None:
    every = 8.0 if at_end else 1.0
    job = job_file(3, epochs=8.0, evaluate_epochs=every)
    outcome = Simulation(job, EvaluatesNothing(np.inf), compute=STEPS).run(600.0)
    assert (outcome.state, outcome.reason) == ("failed", f"worker-0, worker-1: {TORN}")
    assert (outcome.store.run["step"] == 256) is at_end


def test_what_evaluate_raises_in_one_worker_another_one_evaluates() -> None:
    job = job_file(3, epochs=8.0, evaluate_epochs=4.0)
    outcome = Simulation(job, EvaluatesNothing(1), compute=STEPS).run(600.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    assert outcome.store.texts("quarantine") == [f"worker-0 is quarantined: {TORN}"]
    first = next(at for at, kind, *_ in outcome.store.events if kind == "evaluation")
    error = next(at for at, kind, *_ in outcome.store.events if kind == "error")
    assert first - error < 0.5


@pytest.mark.long
def test_who_fails_after_its_coordinator_is_replaced_is_compared_with_those_before() -> None:
    problem = Raises(1)
    simulation = simulated(problem, epochs=40.0)
    world = simulation.world

    def spread() -> None:
        problem.slots = (1, 2)

    simulation.at(4.0, lambda: world.kill(COORDINATOR))
    simulation.at(9.0, spread)
    outcome = simulation.run(600.0)
    assert world.coordinator.incarnation == 2
    assert (outcome.state, outcome.reason) == ("failed", f"worker-1, worker-2: {TORN}")
    assert outcome.store.texts("quarantine") == [f"worker-1 is quarantined: {TORN}"]
    assert states(outcome)[1:] == ["failed", "failed"], "nobody is left out when it is recovered"


@pytest.mark.long
def test_a_new_worker_that_fails_while_the_others_train_is_taken_out() -> None:
    simulation = simulated(Raises(3, first=0), epochs=40.0)
    simulation.request(2.0, "scale", {"workers": 4})
    outcome = simulation.run(600.0)
    assert outcome.state == "finished"
    assert outcome.store.texts("quarantine") == [f"worker-3 is quarantined: {TORN}"]


def test_a_restart_gives_it_another_try() -> None:
    problem = Raises(1)
    simulation = simulated(problem, epochs=40.0)
    world = simulation.world

    def mend() -> None:
        problem.slots = ()

    simulation.at(3.0, mend)
    simulation.request(4.0, "restart", {"names": ["worker-1"]})
    simulation.request(8.0, "stop", {})
    outcome = simulation.run(600.0)
    assert outcome.state == "stopped"
    assert "worker-1.2" in processes(outcome)
    assert outcome.store.daemons["worker-1"]["error"] == ""
    assert np.isfinite(world.weights()).all()
