"""All-reduce: what it computes, and that its replicas never differ, whoever comes and goes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from of_torch import OfTorch
from simulated import job_file, rows_in_order

from dlctl.job.config import Choice, Data, Schedule
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.sim.checkers.tables import GroupChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Batch, LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire.messages import Array

PEAK = 0.1


def simulated(
    workers: int,
    made: list[OfTorch] | None = None,
    problem: LeastSquares | None = None,
    **job: Any,
) -> Simulation:
    """With torch's AdamW in the replicas, and a schedule. made: gets every optimiser."""
    wanted = {
        "batch_size": 8, "algorithm": ("allreduce", {}),
        "inner": ("adamw", {"lr": PEAK, "weight_decay": 0.1}),
        "schedule": Schedule(kind="cosine", warmup="10%", final=0.1),
    }  # fmt: skip

    def make(choice: Choice, parameters: Array) -> OfTorch:
        inner = OfTorch(choice, parameters)
        if made is not None:
            made.append(inner)
        return inner

    # Who leases ahead may take what another one needs for the present step.
    file = replace(
        job_file(workers, 0, **(wanted | job)), data=Data(portion_batches=1, lease_ahead_s=0.0)
    )
    return Simulation(
        file, problem or LeastSquares(samples=256),
        compute=ComputeOptions(step_s=0.1), checkers=(GroupChecker(),),
        inner=lambda choice: partial(make, choice),
    )  # fmt: skip


def replicas(outcome: Outcome, made: list[OfTorch], workers: int) -> list[list[float]]:
    """Of each the parameters, how far it is, and what its optimiser keeps."""
    assert outcome.state == "finished", outcome.reason
    found = []
    for slot in range(workers):
        side = outcome.world.machine(f"worker-{slot}").training.side
        (inner,) = (inner for inner in made if inner.parameters is side.parameters)
        found.append([*side.parameters, side.samples, *inner.packed()])
    return found


@pytest.mark.long
@pytest.mark.oracle("allreduce", "a script: torch.optim.AdamW, cosine")
def test_four_workers_are_a_script_with_adamw_and_a_schedule(agree):
    """Its batch is as large as all of theirs."""
    outcome = simulated(4, epochs=7.0).run()
    assert outcome.state == "finished", outcome.reason
    problem = LeastSquares(samples=256)
    w = problem.initial()
    parameter = torch.nn.Parameter(torch.from_numpy(w))
    script = torch.optim.AdamW([parameter], lr=PEAK, weight_decay=0.1)
    steps = 7 * 256 // 32
    for step, rows in enumerate(rows_in_order(job_file(batch_size=32), 256, epochs=7)):
        cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * (step / steps - 0.1) / 0.9)) / 2
        warm = step / (0.1 * steps)
        script.param_groups[0]["lr"] = PEAK * (warm if warm < 1 else cosine)
        gradient = problem.gradient(w, Batch(rows, 0, 1, step))[1]
        parameter.grad = torch.from_numpy(gradient.astype("f4"))
        script.step()
    assert step == steps - 1 >= 50
    agree(outcome.weights, w, atol=2e-6)


@pytest.mark.long
@pytest.mark.oracle("allreduce", "sync")
def test_it_is_sync_with_the_optimiser_in_the_replicas(agree):
    options = {"batch_size": 8, "portion_batches": 1, "epochs": 4.0}
    job = job_file(4, 2, algorithm=("sync", {}), optimizer=("sgd", {"lr": 0.1}), **options)
    sync = Simulation(job, LeastSquares(samples=256)).run()
    job = job_file(4, 0, algorithm=("allreduce", {"inner_lr": 0.1}), **options)
    own = Simulation(job, LeastSquares(samples=256)).run()
    agree(own.weights, sync.weights, atol=1e-6)


@pytest.mark.parametrize("victims", [("worker-1",), ("worker-0",), ("worker-2", "coordinator")])
def test_who_comes_back_has_the_model_and_the_optimiser_of_the_others_to_the_last_bit(victims):
    made: list[OfTorch] = []
    simulation = simulated(3, made, epochs=12.0)
    for at_s, victim in enumerate(victims, 2):
        simulation.at(float(at_s), lambda victim=victim: simulation.world.kill(victim))  # type: ignore[misc]
    outcome = simulation.run()
    first, *others = replicas(outcome, made, 3)
    assert len(made) == 3 + sum(victim != "coordinator" for victim in victims)
    assert others == [first, first]


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("at_s", [1.5, 3.0])
@pytest.mark.parametrize("hook", ["bf16", "powersgd", "post-local-sgd", "none"])
def test_with_every_hook_all_have_one_model_in_the_end_whoever_has_died(hook, at_s):
    """And what they keep of low-rank sums is handed on, too."""
    made: list[OfTorch] = []
    problem = LeastSquares(samples=256, size=400)
    problem.layout = Layout((TensorEntry("w", TRAINED, (20, 20), "float32"),))
    options = {"hook": hook, "powersgd_after_steps": 20, "local_after_steps": 20}
    simulation = simulated(3, made, problem, epochs=8.0, algorithm=("allreduce", options))
    simulation.at(at_s, lambda: simulation.world.kill("worker-1"))
    outcome = simulation.run()
    first, *others = replicas(outcome, made, 3)
    kept = 401 if hook == "post-local-sgd" else len(first)
    assert [other[:kept] for other in others] == [first[:kept]] * 2
    if hook == "powersgd":
        sides = [outcome.world.machine(f"worker-{slot}").training.side for slot in range(3)]
        assert all(np.array_equal(side.state()["q"], sides[0].state()["q"]) for side in sides)
        assert any(side.state()["error"].any() for side in sides)


@pytest.mark.parametrize("after_s", [0.02, 0.03, 0.04, 0.05])
def test_who_joins_is_no_source_of_the_model_though_the_giver_dies_before_it_was_handed(after_s):
    """Of two sums of a step it has been in the first one, and its slot is the lowest."""
    made: list[OfTorch] = []
    problem = LeastSquares(samples=256, size=400)
    problem.layout = Layout((TensorEntry("w", TRAINED, (20, 20), "float32"),))
    options = {"hook": "powersgd", "powersgd_after_steps": 5}
    simulation = simulated(3, made, problem, epochs=8.0, algorithm=("allreduce", options))
    world, joined = simulation.world, []

    def look() -> None:
        training = getattr(world.machine("worker-0"), "training", None)
        if not joined and training is not None and training.collecting._has_summed:
            joined.append(training)
            simulation.at(world.timeline.now + after_s, lambda: world.kill("worker-1"))

    simulation.at(2.0, lambda: world.kill("worker-0"))
    for at_s in np.arange(2.05, 6.0, 0.002):
        simulation.at(float(at_s), look)
    first, *others = replicas(simulation.run(), made, 3)
    assert joined
    assert others == [first, first]


def test_a_rate_that_is_set_live_is_the_same_in_all_replicas_at_each_step():
    made: list[OfTorch] = []
    simulation = simulated(3, made, epochs=12.0)
    simulation.request(3.0, "set", {"names": [], "settings": {"inner_lr": 0.03}})
    outcome = simulation.run()
    assert outcome.world.machine("worker-2").settings.values()["inner_lr"] == 0.03
    first, *others = replicas(outcome, made, 3)
    assert others == [first, first]
