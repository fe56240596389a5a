"""A live setting for a daemon that cannot be reached just then is put in force when it can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated import job_file

from dlctl.job.config import Stop
from dlctl.roles.coordinator.settings import ANSWER_S_MAX
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.client import Client
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation

pytestmark = pytest.mark.long

CUT_S, HEAL_S, LOOK_S = 10.0, 20.0, 25.0


def cut_off_worker() -> Simulation:
    """Nothing gets to worker-1 for ten seconds."""
    job = job_file(workers=2, seconds=40.0, optimizer=("sgd", {"lr": 0.01}))
    simulation = Simulation(job, LeastSquares(), compute=ComputeOptions(step_s=0.1))
    network = simulation.world.network
    simulation.at(CUT_S, lambda: network.cut(COORDINATOR, "worker-1"))
    simulation.at(HEAL_S, lambda: network.heal(COORDINATOR, "worker-1"))
    return simulation


def set_at(simulation: Simulation, when_s: float, **texts: str) -> Client:
    return simulation.request(when_s, "set", {"names": ["worker-1"], "settings": texts})


def in_force_at(simulation: Simulation, when_s: float) -> dict[str, Any]:
    """What worker-1 has then, once the run is over."""
    found: dict[str, Any] = {}
    worker = simulation.world.machine
    simulation.at(when_s, lambda: found.update(worker("worker-1").settings.values()))
    return found


def test_what_was_set_outlasts_a_stop() -> None:
    """But not for a daemon that is not there any more."""
    job = job_file(workers=2, seconds=5.0, optimizer=("sgd", {"lr": 0.01}))
    first = Simulation(job, LeastSquares(), compute=ComputeOptions(step_s=0.1))
    first.request(3.0, "set", {"names": [], "settings": {"lr": "0.003", "push": "1MB/s"}})
    store = first.run().store
    fewer = replace(
        job, workers=replace(job.workers, count=1), job=replace(job.job, stop=Stop(seconds=3.0))
    )
    second = Simulation(fewer, LeastSquares(), store=store, compute=ComputeOptions(step_s=0.1))
    found: dict[str, Any] = {}
    machine = second.world.machine
    second.at(2.0, lambda: found.update(machine("server-0").live.values()))
    second.at(2.0, lambda: found.update(machine("worker-0").settings.values()))
    outcome = second.run()
    assert outcome.state == "finished"
    assert (found["lr"], found["push"]) == (0.003, 1e6)
    assert sorted(outcome.store.run["settings"]) == ["server-0", "worker-0"]


def test_who_cannot_be_reached_has_the_new_setting_soon_after_it_can() -> None:
    simulation = cut_off_worker()
    client = set_at(simulation, CUT_S + 1.0, push="1MB/s")
    before = in_force_at(simulation, HEAL_S - 0.1)
    after = in_force_at(simulation, LOOK_S)
    outcome = simulation.run()
    assert (before["push"], after["push"]) == (None, 1e6)
    assert outcome.store.daemons["worker-1"]["incarnation"] == 1
    assert client.reply is not None
    assert client.reply.result["missing"] == ["worker-1"]


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("pause_s", [1.0, ANSWER_S_MAX + 1.0, HEAL_S - CUT_S + 0.5])
def test_of_two_changes_that_were_late_the_newer_one_wins(pause_s: float) -> None:
    simulation = cut_off_worker()
    set_at(simulation, CUT_S + 1.0, push="1MB/s", fetch="3MB/s")
    set_at(simulation, CUT_S + 1.0 + pause_s, push="2MB/s")
    after = in_force_at(simulation, LOOK_S)
    simulation.run()
    assert (after["push"], after["fetch"]) == (2e6, 3e6)


def test_who_dies_before_it_can_be_reached_is_not_asked_any_more() -> None:
    """The next process begins with the setting."""
    simulation = cut_off_worker()
    set_at(simulation, CUT_S + 1.0, push="1MB/s")
    simulation.at(HEAL_S - 1.0, lambda: simulation.world.kill("worker-1"))
    waiting: list[bool] = []

    def look() -> None:
        context = simulation.world.machine(COORDINATOR).context
        waiting.append(("change", "worker-1") in context.retries)

    simulation.at(HEAL_S - 1.1, look)
    simulation.at(HEAL_S - 0.5, look)
    after = in_force_at(simulation, LOOK_S)
    simulation.run()
    assert waiting == [True, False]
    assert after["push"] == 1e6
