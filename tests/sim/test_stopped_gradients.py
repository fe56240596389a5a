"""Gradients that are stopped because they are too old: by news of the servers, without a loss."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import ACCOUNT, Watcher, job_file, ledger_checkers

from dlctl.job.config import Gradients
from dlctl.roles.protocol.effects import Compute, StopCompute
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire.messages import LATE, Ack, Fetch, Report

SLOW, STEP_S, PARTS = "worker-2", 0.08, 4
POOR = NetworkOptions(link=SimLink(jitter_s=0.002, loss=0.05, duplicate=0.05, reorder=0.1))


class Stops(Checker):
    """Who is told to stop, and how often a worker begins to compute."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.begun = 0

    def on_effect(self, process: Any, effect: Any) -> None:
        self.begun += isinstance(effect, Compute)
        if isinstance(effect, StopCompute):
            self.names.append(process.name)


def run(
    method: str, *more: Checker, accumulate: int = PARTS, seed: int = 0, once: bool = True,
    network: NetworkOptions | None = None, faults: Faults | None = None,
    restarts_at_s: float = 0.0, step_s: float = STEP_S, **options: Any,
) -> tuple[Outcome, Stops]:  # fmt: skip
    """Three workers, one of which takes six times as long, on two servers."""
    problem, stops = Ledger(shards=2, cells=1200, samples=640), Stops()
    job = job_file(
        3, 2, algorithm=(method, {"delay_max": 4, **options}), optimizer=ACCOUNT, epochs=2.0,
        batch_size=4, portion_batches=2, seed=seed, gradient=Gradients(accumulate=accumulate),
        restarts_max=20,
    )  # fmt: skip
    checkers = ledger_checkers(
        problem, epochs=2, once=once, totals=True, heal_at_s=125 * step_s
    )  # fmt: skip
    simulation = Simulation(
        job, problem, seed, network=network, faults=faults,
        compute=ComputeOptions(step_s=step_s, spread=0.0, slow={2: 6.0}),
        checkers=(*checkers, stops, *more),
    )  # fmt: skip
    if restarts_at_s:
        simulation.request(restarts_at_s, "restart", {"names": [SLOW]})
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    return outcome, stops


@pytest.mark.parametrize("method", ["ringmaster", "ringmaster-lmo"])
def test_a_worker_that_is_too_far_behind_stops_and_computes_the_same_samples_again(
    method: str,
) -> None:
    acks = Watcher(Ack)
    outcome, stops = run(method, acks)
    assert set(stops.names) == {SLOW}
    assert stops.begun > len(outcome.world.objective.authors), "some have begun again"
    assert not [ack for ack in acks.messages() if ack.outcome == LATE], "none came too late"


def test_a_worker_that_ends_no_gradient_is_slow_and_does_not_hang() -> None:
    """Each attempt takes longer than a batch usually may, before its first part is computed."""
    reports = Watcher(Report)
    _, stops = run("ringmaster", reports, step_s=8.0, delay_max=2)
    assert len(stops.names) > 20
    hang = [report for report in reports.messages(SLOW) if report.metrics.get("hangs")]
    assert len(hang) < 5, "only in the first attempt"


def test_nobody_stops_and_no_news_is_asked_for_where_a_gradient_is_one_batch() -> None:
    acks, fetches = Watcher(Ack), Watcher(Fetch)
    _, stops = run("ringmaster", acks, fetches, accumulate=1)
    assert not stops.names
    assert not [fetch for fetch in fetches.messages() if fetch.clock_min]
    assert [ack for ack in acks.messages() if ack.outcome == LATE], "they are dropped, as before"


def test_a_slow_worker_that_drains_ends_its_gradient_and_its_portion() -> None:
    """Else the others would compute these samples again, or it would not end before they are done.
    It is in the middle of a gradient when it is told to drain.
    """
    outcome, stops = run("ringmaster", restarts_at_s=1.6)
    assert stops.names
    assert f"{SLOW} ended: exit 0" in outcome.store.texts("stop")
    assert not outcome.store.texts("late")


def test_nobody_stops_while_all_are_equally_fast() -> None:
    _, stops = run("ringmaster", delay_max=100)
    assert not stops.names


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.long)])
def test_nothing_is_lost_or_twice_whoever_dies_while_gradients_are_stopped(seeds: range) -> None:
    found = 0
    for seed in seeds:
        faults = Faults(
            kills=2, server_kills=1, coordinator_kills=seed % 2, resets=1, from_s=0.5, heal_at_s=5.0
        )
        _, stops = run("ringmaster", seed=seed, network=POOR, faults=faults, once=False)
        found += len(stops.names)
    assert found > 5 * len(seeds)
