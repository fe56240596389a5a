"""Who evaluates, what of, and that nothing keeps a run from being evaluated."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import job_file

from dlctl.job.config import Host
from dlctl.roles.protocol.effects import RunEvaluation
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.world import RESTART_S

pytestmark = pytest.mark.long

EVALUATE_S = 20.0


class Evaluators(Checker):
    """Who has begun an evaluation."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_effect(self, process: Any, effect: Any) -> None:
        if isinstance(effect, RunEvaluation):
            self.names.append(process.name)


def evaluations(outcome: Outcome, since_s: float = 0.0) -> list[tuple[str, str]]:
    """Who has evaluated, and of what: ("worker-0", "step 40: loss 0.5")."""
    events = [event for event in outcome.store.events if event[0] >= since_s]
    return [(name, text) for _, kind, name, text in events if kind == "evaluation"]


# ---------------------------------------------------------------- who evaluates


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("grace_s", [1.0, 30.0])
def test_a_worker_that_hangs_is_not_asked_to_evaluate_while_another_is_well(grace_s: float) -> None:
    """It says so, or is not drained when its time is over."""
    slow = {0: 1.0}
    job = job_file(workers=2, seconds=100.0, timeouts={"grace_s": grace_s})
    simulation = Simulation(job, LeastSquares(), compute=ComputeOptions(step_s=0.1, slow=slow))
    simulation.at(99.0 if grace_s < 10.0 else 5.0, lambda: slow.update({0: 1e6}))
    outcome = simulation.run()
    assert [name for name, _ in evaluations(outcome)] == ["worker-1"]
    assert outcome.seconds < 100.0 + grace_s + 60.0


def test_a_worker_whose_host_is_away_is_not_asked_to_evaluate() -> None:
    hosts = Host(ssh="h1", servers=0, workers=1), Host(ssh="h2", servers=1, workers=1)
    job = job_file(
        workers=2, seconds=60.0, evaluate_epochs=1.0, hosts=hosts,
        timeouts={"silent_s": 3.0, "host_s": 200.0, "grace_s": 5.0},
    )  # fmt: skip
    simulation = Simulation(job, LeastSquares(), compute=ComputeOptions(step_s=0.1))
    away_s = 10.0
    simulation.at(away_s, lambda: simulation.world.cut_off("agent-1"))
    outcome = simulation.run(400.0)
    assert outcome.state == "finished"
    late = [name for name, _ in evaluations(outcome, since_s=away_s + 10.0)]
    assert len(late) > 1
    assert set(late) == {"worker-1"}


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("dead", [1, 3])
def test_who_is_lost_to_the_last_evaluation_is_followed_by_one_other(dead: int) -> None:
    """One more dies of it, too: those who are left are needed for the checkpoint."""
    job = job_file(workers=3, seconds=30.0)
    compute = ComputeOptions(step_s=0.1, evaluate_s=EVALUATE_S)
    simulation = Simulation(job, LeastSquares(), compute=compute)
    for slot in range(dead):
        when_s = 30.0 + EVALUATE_S / 2 + slot * EVALUATE_S / 2
        simulation.at(when_s, lambda slot=slot: simulation.world.kill(f"worker-{slot}"))
    evaluators = Evaluators()
    simulation.world.observers.append(evaluators)
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert evaluators.names == ["worker-0", "worker-1"]
    assert [name for name, _ in evaluations(outcome)] == (["worker-1"] if dead == 1 else [])


def test_a_last_evaluation_that_does_not_end_is_not_tried_again() -> None:
    job = job_file(workers=2, seconds=30.0)
    compute = ComputeOptions(step_s=0.1, evaluate_s=1e7)
    outcome = Simulation(job, LeastSquares(), compute=compute).run()
    assert outcome.state == "finished"
    assert outcome.seconds < 30.0 + EVALUATE_S_MAX + 60.0


def test_an_evaluation_has_its_time_when_the_model_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On this link it takes longer to come than the evaluation may take."""
    monkeypatch.setattr("dlctl.roles.coordinator.evaluation.EVALUATE_S_MAX", 6.0)
    job = job_file(
        workers=2, seconds=300.0, batch_size=1, evaluate_epochs=2.0,
        optimizer=("sgd", {"lr": 1e-4}),
        algorithm=("downpour", {"push_every_steps": 100, "fetch_every_steps": 100}),
    )  # fmt: skip
    simulation = Simulation(
        job, LeastSquares(samples=64, size=2000), compute=ComputeOptions(step_s=1.0),
        network=NetworkOptions(link=SimLink(latency_s=0.001, jitter_s=0.0, bytes_per_s=1000.0)),
    )  # fmt: skip
    outcome = simulation.run()
    assert outcome.store.texts("silent") == []
    assert len(evaluations(outcome)) > 1


# ---------------------------------------------------------------- what is evaluated


@pytest.mark.parametrize("workers", [1, 2])
def test_the_last_evaluation_is_none_that_was_under_way_before(workers: int) -> None:
    """An old one is reported with its step, and then another one is made."""
    problem = LeastSquares(samples=1024)
    job = job_file(workers=workers, seconds=60.0, evaluate_epochs=1.0)
    compute = ComputeOptions(step_s=0.1, evaluate_s=100.0)
    outcome = Simulation(job, problem, compute=compute).run()
    (_, old), (_, last) = evaluations(outcome)
    step = outcome.store.run["evaluation_step"]
    assert outcome.store.run["evaluation"] == problem.evaluate(outcome.weights)
    assert step == outcome.store.run["step"]
    assert last.startswith(f"step {step}: ")
    begun_at = int(old.removeprefix("step ").partition(":")[0])
    assert 128 <= begun_at < 128 + 8, "an epoch, and what others have done until it was noted"
    assert workers == 1 or begun_at < step


def test_a_coordinator_goes_on_with_the_evaluation_that_an_older_dlctl_has_recorded() -> None:
    job = job_file(workers=2, seconds=30.0, evaluate_epochs=0.0)
    simulation = Simulation(job, LeastSquares(), compute=ComputeOptions(step_s=0.1))
    store, shown = simulation.world.store, list[Any]()

    def replace() -> None:
        store.memory["work"][5] = {"accuracy": 0.5, "step": 7}
        simulation.world.kill("coordinator")

    def look() -> None:
        shown.extend((store.run["evaluation"], store.run["evaluation_step"]))

    simulation.at(10.0, replace)
    simulation.at(20.0, look)
    simulation.run()
    assert shown == [{"accuracy": 0.5}, 7]


def test_at_the_end_nobody_waits_for_an_evaluation_that_does_not_begin() -> None:
    """worker-0 was asked for one, and hangs in its batch ever since."""
    slow = {0: 1.0}
    job = job_file(workers=2, seconds=60.0, evaluate_epochs=1.0, timeouts={"grace_s": 5.0})
    compute = ComputeOptions(step_s=0.1, slow=slow)
    simulation = Simulation(job, LeastSquares(samples=1024), compute=compute)
    simulation.at(2.0, lambda: slow.update({0: 1e6}))
    outcome = simulation.run()
    assert [name for name, _ in evaluations(outcome)] == ["worker-1"]
    assert outcome.seconds < 100.0


# ---------------------------------------------------------------- a coordinator that dies often


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("evaluate_s", [0.05, 8.0])
@pytest.mark.parametrize("portion_batches", [4, 100])
def test_a_coordinator_that_dies_often_puts_off_neither_evaluations_nor_the_end(
    portion_batches: int, evaluate_s: float
) -> None:
    """Even if one takes longer than the coordinator lives, and if nothing else is to be noted."""
    seconds, epoch_s, lives_s = 90.0, 10.0, 2.0
    job = job_file(2, seconds=seconds, evaluate_epochs=1.0, portion_batches=portion_batches)
    compute = ComputeOptions(step_s=0.1, evaluate_s=evaluate_s)
    simulation = Simulation(job, LeastSquares(samples=1600), compute=compute)
    period_s = lives_s + RESTART_S
    for number in range(1, 60):
        simulation.at(number * period_s, lambda: simulation.world.kill("coordinator"))
    outcome = simulation.run(400.0)
    assert outcome.state == "finished"
    ends_s = next(event[0] for event in outcome.store.events if "stopping" in event[3])
    # Of every life the time since its last note is not counted: a quarter of it, in the mean.
    assert seconds < ends_s * lives_s / period_s < 1.4 * seconds
    assert len(evaluations(outcome)) > 0.8 * ends_s / (epoch_s + evaluate_s)
