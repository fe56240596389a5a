"""The task's `finish`: once, by one worker, and nothing of the run hangs on it. What stays as the
best checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated import job_file

from dlctl.job.config import Checkpoints
from dlctl.roles.protocol.effects import RunEvaluation
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Outcome, Simulation

RUN_S, FINISH_S = 10.0, 20.0


class Finishers(Checker):
    """Who has begun to run it."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_effect(self, process: Any, effect: Any) -> None:
        if isinstance(effect, RunEvaluation) and effect.finish_with is not None:
            self.names.append(process.name)


def simulate(
    kills: tuple[tuple[float, str], ...] = (), finish_s: float = FINISH_S, **job: Any
) -> tuple[Outcome, list[str]]:
    """Two workers; kills: seconds after the end of training, and who."""
    compute = ComputeOptions(step_s=0.1, finish_s=finish_s)
    made = job_file(workers=2, seconds=RUN_S, **job)
    simulation = Simulation(made, LeastSquares(), compute=compute)
    for after_s, name in kills:
        simulation.at(RUN_S + after_s, lambda name=name: simulation.world.kill(name))
    finishers = Finishers()
    simulation.world.observers.append(finishers)
    outcome = simulation.run()
    assert outcome.state == "finished"
    return outcome, finishers.names


def test_it_is_of_the_final_model_with_the_last_metrics() -> None:
    outcome, names = simulate()
    run = outcome.store.run
    metrics = run["evaluation"]
    assert metrics == LeastSquares().evaluate(outcome.weights)
    told = {"worker": "worker-0", "text": f"{metrics} of {metrics}", "error": ""}
    assert run["finish"] == told
    assert names == ["worker-0"]


@pytest.mark.parametrize(
    ("kills", "asked", "error"),
    [
        (((5.0, "worker-0"),), ["worker-0", "worker-1"], ""),
        (((5.0, "worker-0"), (10.0, "worker-1")), ["worker-0", "worker-1"], "died"),
        (((5.0, "server-0"),), ["worker-0"], ""),
        (((5.0, "coordinator"),), ["worker-0"], ""),
    ],
    ids=["a worker", "all workers", "a server", "the coordinator"],
)
def test_it_is_begun_again_at_most_once_whoever_dies(
    kills: tuple[tuple[float, str], ...], asked: list[str], error: str
) -> None:
    outcome, names = simulate(kills)
    assert names == asked
    assert error in outcome.store.run["finish"]["error"]
    assert bool(outcome.store.run["finish"]["text"]) == (not error)


@pytest.mark.long
def test_who_takes_too_long_is_waited_for_no_longer() -> None:
    outcome, names = simulate(finish_s=1e6)
    assert names == ["worker-0"]
    assert outcome.store.run["finish"]["error"].startswith("not done")
    assert outcome.seconds < RUN_S + 60.0 + 30.0
    saved = [manifest["step"] for manifest in outcome.store.manifests.values()]
    assert saved[-1] == outcome.store.run["step"], "the checkpoint comes first"


# ---------------------------------------------------------------- the best checkpoint


def evaluated(best: str) -> Outcome:
    """Checkpoints at the end alone, and one is kept; the loss falls all the time."""
    job = job_file(
        workers=2, seconds=60.0, evaluate_epochs=1.0, optimizer=("sgd", {"lr": 1e-3})
    )  # fmt: skip
    job = replace(job, checkpoints=Checkpoints(every_s=0.0, keep=1, best=best))
    compute = ComputeOptions(step_s=0.1)
    return Simulation(job, LeastSquares(samples=512), compute=compute).run()


@pytest.mark.long
def test_the_best_is_saved_at_once_and_stays() -> None:
    outcome = evaluated("loss max")
    first, last = sorted(outcome.store.manifests.values(), key=lambda found: found["number"])
    texts = [text for text in outcome.store.texts("evaluation") if text.startswith("step ")]
    assert len(texts) > 3
    assert texts[0].startswith(f"step {first['evaluation_step']}: ")
    assert 0 <= first["step"] - first["evaluation_step"] < 16
    assert last["step"] == last["evaluation_step"] == outcome.store.run["step"]
    (only,) = evaluated("loss min").store.manifests.values()
    assert only["number"] > last["number"], "each was better than the one before"


@pytest.mark.long
def test_a_metric_that_is_not_there_is_told_once() -> None:
    (text,) = evaluated("val_loss min").store.texts("target")
    assert text.startswith('best = "val_loss min" of [checkpoints] keeps no checkpoint: the task')
    assert "returns" in text
    assert "loss" in text
