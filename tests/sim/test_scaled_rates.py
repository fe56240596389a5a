"""The rate of a run whose number of workers changes, whoever dies meanwhile."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from simulated import job_file

from dlctl.job.config import Schedule
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store
from dlctl.wire.messages import Push

LR, SAMPLES, WARMUP = 0.02, 256, 320


class Rates(Checker):
    """Shard -> {samples that it has had: the rate of the update that follows}."""

    def __init__(self) -> None:
        self.of: defaultdict[int, dict[int, float]] = defaultdict(dict)

    def on_message(self, process: Any, peer: Any, message: Any) -> None:
        serving = getattr(process.machine, "serving", None)
        if isinstance(message, Push) and serving is not None:
            self.of[serving.index][serving.shard.samples] = serving.shard.optimizer.lr


def run(
    store: Store, epochs: float, *requests: tuple[float, int], kill: str = ""
) -> tuple[Outcome, Rates]:
    """requests: seconds, workers."""
    job = job_file(
        2, 2, batch_size=8, portion_batches=1, epochs=epochs, algorithm=("sync", {}),
        optimizer=("sgd", {"lr": LR}),
        schedule=Schedule(warmup=f"{WARMUP} samples", lr_scaling="linear"),
    )  # fmt: skip
    rates, slow = Rates(), ComputeOptions(step_s=0.1)
    simulation = Simulation(
        job, LeastSquares(samples=SAMPLES), store=store, compute=slow, checkers=(rates,)
    )
    for at_s, workers in requests:
        simulation.request(at_s, "scale", {"workers": workers})
    if kill:
        simulation.at(requests[0][0] + 1.0, lambda: simulation.world.kill(kill))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    return outcome, rates


@pytest.mark.long
@pytest.mark.parametrize("kill", ["", "server-1", "coordinator", "worker-0"])
def test_the_rate_goes_to_that_of_the_new_number_over_a_warm_up(kill: str) -> None:
    outcome, rates = run(Store(), 12.0, (6.0, 4), kill=kill)
    since, before, after = outcome.world.machine("coordinator").rate.scale
    assert (before, after) == (1.0, 2.0)
    assert WARMUP < since < 8 * SAMPLES
    assert set(rates.of) == {0, 1}
    for shard in rates.of.values():
        assert len(shard) > 100
        for samples, rate in shard.items():
            scale = 1 + min(1.0, max(0.0, (samples - since) / WARMUP))
            assert rate == pytest.approx(LR * min(1.0, samples / WARMUP) * scale, rel=1e-12), (
                samples
            )


@pytest.mark.long
def test_a_run_that_goes_on_has_the_number_of_its_job_again() -> None:
    store = Store()
    first, _ = run(store, 8.0, (3.0, 6))
    assert first.world.machine("server-0").serving.shard.optimizer.lr == pytest.approx(3 * LR)
    second, rates = run(store, 14.0)
    assert second.world.machine("coordinator").rate.scale == (8 * SAMPLES, 3.0, 1.0)
    for samples, rate in rates.of[0].items():
        part = min(1.0, (samples - 8 * SAMPLES) / WARMUP)
        assert rate == pytest.approx(LR * (3 - 2 * part), rel=1e-12)
