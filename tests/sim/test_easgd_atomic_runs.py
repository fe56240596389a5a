"""Whole runs of EASGD whose servers compute the pull: what one side gives the other one gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scenarios import poor_network
from simulated import Spy, job_file

from dlctl.algorithms.methods.easgd_atomic import Replica
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import LivenessChecker, NothingLeft, SamplesChecker, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.simulation import Simulation

WORKERS, SERVERS, EPOCHS, RATE = 3, 2, 4, 0.05


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 40))]
)
def test_positions_and_centre_hold_all_steps_whichever_servers_die(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without deaths of workers: sum of positions + centre = where all began - rate * gradients."""
    began: list[np.ndarray] = []
    honest = Replica._take_centre

    def take_centre(side: Replica) -> Any:
        done = yield from honest(side)
        began.append(side.parameters.astype(np.float64))
        return done

    monkeypatch.setattr(Replica, "_take_centre", take_centre)
    problem, rng = Spy(samples=96), np.random.default_rng([seed, 12])
    job = job_file(
        WORKERS, SERVERS, batch_size=4, portion_batches=2, seed=seed, epochs=float(EPOCHS),
        algorithm=("easgd-atomic", {"exchange_every_steps": 2, "inner_lr": RATE}),
        optimizer=("sgd", {"lr": 1.0}), restarts_max=20, durability=("process", "disk")[seed % 2],
        timeouts={"resend_s": 0.3, "silent_s": 6.0},
    )  # fmt: skip
    simulation = Simulation(
        job, problem, seed, network=poor_network(seed),
        compute=ComputeOptions(step_s=0.1, spread=0.4),
        checkers=(
            TermsChecker(), SamplesChecker(problem.samples, EPOCHS, once=True),
            LivenessChecker(8.0), NothingLeft(),
        ),
    )  # fmt: skip
    for name in ("server-0", "server-1", "server-0", COORDINATOR):
        when_s = float(rng.uniform(0.5, 3.5))
        simulation.at(when_s, lambda name=name: simulation.world.kill(name))
    outcome = simulation.run(200.0)
    assert outcome.state == "finished", outcome.reason
    replicas = [simulation.world.machine(f"worker-{slot}").training for slot in range(WORKERS)]
    held = sum(r.side.parameters.astype(np.float64) for r in replicas) + outcome.weights
    steps = RATE * sum(g.astype(np.float64) for g in problem.given)
    assert len(began) == WORKERS
    expected = sum(began) + problem.initial() - steps
    np.testing.assert_allclose(held, expected, rtol=0, atol=1e-4)
    assert np.abs(steps).max() > 0.1
