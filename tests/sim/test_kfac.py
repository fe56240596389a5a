"""K-FAC in virtual time: it is a loop with dense matrices, and replicas never differ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from of_torch import OfTorch
from simulated import job_file, rows_in_order
from test_allreduce import replicas

from dlctl.algorithms.methods.kfac import EIGENS, FACTORS, PHASES, UPDATES
from dlctl.job.config import Choice, Data
from dlctl.sim.checkers.tables import GroupChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Batch, LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.sim.store import Store
from dlctl.wire.messages import Array

OPTIONS = {"factor_steps": 2, "eigen_steps": 4, "damping": 0.01, "kl_clip": 0.0}
LR = 0.3
PLACEMENTS = ("opt", "lw")
every_placement = pytest.mark.parametrize("placement", PLACEMENTS)


def run(
    workers: int,
    placement: str = "opt",
    problem: LeastSquares | None = None,
    store: Store | None = None,
    **job: Any,
) -> tuple[Simulation, list[OfTorch]]:
    """With SGD and a momentum in the replicas; together they have batches of 32."""
    made: list[OfTorch] = []

    def make(choice: Choice, parameters: Array) -> OfTorch:
        made.append(OfTorch(choice, parameters))
        return made[-1]

    options = OPTIONS | {"placement": placement} | job.pop("options", {})
    wanted = {"batch_size": 32 // workers, "inner": ("sgd", {"lr": LR, "momentum": 0.5})}
    stop = {} if "steps" in job else {"epochs": 7.0}
    file = job_file(workers, 0, algorithm=("kfac", options), **(wanted | stop | job))
    # Who leases ahead may take what another one needs for the present step.
    file = replace(file, data=Data(portion_batches=1, lease_ahead_s=0.0))
    simulation = Simulation(
        file, problem or LeastSquares(samples=256), store=store,
        compute=ComputeOptions(step_s=0.1), checkers=(GroupChecker(),),
        inner=lambda choice: partial(make, choice),
    )  # fmt: skip
    return simulation, made


@pytest.mark.oracle("kfac", "a loop with dense matrices, one process")
@pytest.mark.parametrize("workers", [1, 2, 4])
@every_placement
def test_replicas_are_a_loop_with_dense_matrices(workers, placement, agree):
    """The joint batch of all of them, 56 steps."""
    simulation, _ = run(workers, placement, options={"kl_clip": 0.001})
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    problem = LeastSquares(samples=256)
    w, velocity = problem.initial().astype(float), np.zeros(12)
    a, g, inverse = np.eye(12), 1.0, np.eye(12)
    for step, rows in enumerate(rows_in_order(job_file(batch_size=32), 256, epochs=7)):
        batch = Batch(rows, 0, 1, step)
        inputs, outputs = problem.rows(w, batch)
        if step % 2 == 0:
            a = 0.95 * a + 0.05 * inputs.T @ inputs / 32
            g = 0.95 * g + 0.05 * 32 * float((outputs**2).sum())
        if step % 4 == 0:
            inverse = np.linalg.inv(g * a + 0.01 * np.eye(12))
        gradient = problem.gradient(w, batch)[1]
        along = inverse @ gradient
        nu = min(1.0, np.sqrt(0.001 / abs(LR**2 * along @ gradient)))
        velocity = 0.5 * velocity + nu * along
        w -= LR * velocity
    assert step == 55
    agree(outcome.weights, w, atol=1e-4)


def test_both_placements_are_one_method():
    found = [run(3, placement)[0].run().weights for placement in PLACEMENTS]
    np.testing.assert_allclose(*found, atol=1e-6)


@pytest.mark.long
@every_placement
@pytest.mark.parametrize("victims", [("worker-1",), ("worker-0",), ("worker-2", "coordinator")])
def test_who_comes_back_has_all_of_the_others_to_the_last_bit(placement, victims):
    simulation, made = run(3, placement, epochs=12.0)
    for at_s, victim in enumerate(victims, 2):
        simulation.at(float(at_s), lambda victim=victim: simulation.world.kill(victim))  # type: ignore[misc]
    outcome = simulation.run()
    first, *others = replicas(outcome, made, 3)
    assert others == [first, first]
    sides = [outcome.world.machine(f"worker-{slot}").training.side for slot in range(3)]
    assert len({side.step for side in sides}) == 1
    assert all(np.array_equal(side._owners, sides[0]._owners) for side in sides)


class Watched:
    """A replica that waits for a sum of this kind, once somebody has been killed for it; and all
    owners of the layer that the others have then known within the same step.
    """

    def __init__(self, simulation: Simulation, phase: int, who: str) -> None:
        self.world, self.phase, self.who = simulation.world, phase, who
        self.step = self.owner = -1
        self.owners: set[int] = set()
        for at_s in np.arange(1.5, 8.0, 0.002):
            simulation.at(float(at_s), self._look)

    def _look(self) -> None:
        for slot in range(3):
            training = getattr(self.world.machine(f"worker-{slot}"), "training", None)
            need = getattr(getattr(training, "collecting", None), "_need", None)
            if need is None or not need.weight:
                continue
            side = training.side  # type: ignore[union-attr]
            if self.step < 0 and need.step % PHASES == self.phase:
                self.step, self.owner = side.step, int(side._owners[0, 0])
                victim = {"owner": self.owner, "other": (self.owner + 1) % 3}.get(
                    self.who, self.who
                )
                self.world.kill(f"worker-{victim}" if self.who != "coordinator" else self.who)
            elif side.step == self.step and slot != self.owner:
                self.owners.add(int(side._owners[0, 0]))


CASES = [
    (placement, phase, who)
    for placement, phases in {"opt": (FACTORS, EIGENS), "lw": (FACTORS, UPDATES)}.items()
    for phase in phases
    for who in ("owner", "other", "coordinator")
]


@pytest.mark.per_commit(1)
@pytest.mark.parametrize(("placement", "phase", "who"), CASES)
def test_a_death_in_a_sum_leaves_no_hole(placement, phase, who):
    """If the owner of the only layer dies in the sum of what it owns, another one is chosen."""
    simulation, made = run(3, placement, epochs=12.0)
    watched = Watched(simulation, phase, who)
    outcome = simulation.run()
    first, *others = replicas(outcome, made, 3)
    assert watched.step >= 0
    assert others == [first, first]
    is_lost = who == "owner" and (placement == "lw" or phase == EIGENS)
    assert (watched.owners - {watched.owner} != set()) == is_lost
    assert LeastSquares(samples=256).evaluate(outcome.weights)["loss"] < 0.05


@every_placement
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(placement):
    """It is stopped between two eigendecompositions, and two sums of factors."""
    whole = run(2, placement, epochs=5.0)[0].run()
    stopped = run(2, placement, epochs=1.0)[0].run()
    saved = stopped.store.files[stopped.store.newest()]["worker-0.safetensors"]
    assert saved["engine.kfac"].any()
    resumed = run(2, placement, epochs=5.0, store=stopped.store)[0].run()
    assert resumed.weights.tolist() == whole.weights.tolist()
    assert stopped.weights.tolist() != whole.weights.tolist()


@pytest.mark.parametrize("placements", [("lw", "opt"), ("opt", "lw")])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_run_may_go_on_with_the_other_placement_and_more_workers(placements, workers):
    """Replicas that have saved no eigenvectors, or others, have one model nevertheless."""
    before, after = placements
    stopped = run(2, before, epochs=1.0)[0].run()
    simulation, made = run(workers, after, epochs=4.0, store=stopped.store)
    outcome = simulation.run()
    first, *others = replicas(outcome, made, workers)
    assert others == [first] * (workers - 1)
    loss = LeastSquares(samples=256).evaluate
    assert loss(outcome.weights)["loss"] < loss(stopped.weights)["loss"]


def test_a_sum_of_factors_that_is_not_finite_is_skipped_by_all():
    class Odd(LeastSquares):
        def rows(self, w: Any, batch: Batch) -> Any:
            inputs, outputs = super().rows(w, batch)
            return (inputs * np.nan if batch.number == 4 else inputs), outputs

    simulation, made = run(2, problem=Odd(samples=256))
    outcome = simulation.run()
    first, other = replicas(outcome, made, 2)
    assert first == other
    assert np.isfinite(first).all()
    assert LeastSquares(samples=256).evaluate(outcome.weights)["loss"] < 0.1


@pytest.mark.long
def test_a_damping_that_is_set_live_is_the_same_in_all_replicas():
    simulation, made = run(3, epochs=12.0)
    simulation.request(3.0, "set", {"names": [], "settings": {"damping": 0.5}})
    outcome = simulation.run()
    first, *others = replicas(outcome, made, 3)
    assert others == [first, first]
    numbers = [outcome.world.machine(f"worker-{n}").training.side._numbers for n in range(3)]
    assert all(np.array_equal(each, numbers[0]) for each in numbers)
    assert numbers[0][0] == pytest.approx(0.5)
