"""Runs whose replicas make sums together, from their first need to the death of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dlctl_toys.group import Replica
from simulated import Watcher, job_file

from dlctl.algorithms.needs import Collective, Summed, passed_on
from dlctl.job import config
from dlctl.model.vector import copy_into
from dlctl.roles.coordinator.checkpointing import SAVE_S_MAX
from dlctl.roles.coordinator.supervision.groups import LOST
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import RunEvaluation
from dlctl.sim.checkers import Checker
from dlctl.sim.checkers.tables import GroupChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.process import Process
from dlctl.sim.simulation import Simulation
from dlctl.sim.store import Store
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect

WORKERS = 3


def simulated(*checkers: Any, store: Store | None = None, **job: Any) -> Simulation:
    wanted = {"checkpoint_s": 1.0, "epochs": 1000.0} | job
    return Simulation(
        job_file(WORKERS, 0, algorithm=("toy-group", {}), **wanted), LeastSquares(samples=128),
        compute=ComputeOptions(step_s=0.1), checkers=(GroupChecker(), *checkers), store=store,
    )  # fmt: skip


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Summed]:
    """The sums that replicas begin with, before they ask for anything else."""
    honest, sums = Replica.run, list[Summed]()

    def run(self: Replica) -> Any:
        summed = yield Collective(vector=np.ones_like(self.parameters), step=self.step)
        sums.append(summed)
        if summed.joined:
            model, self.step = yield from passed_on(self.parameters, self.slot, self.step, summed)
            copy_into(self.parameters, model)
        yield from honest(self)

    monkeypatch.setattr(Replica, "run", run)
    return sums


def test_a_method_may_begin_with_a_sum(begun: list[Summed]) -> None:
    outcome = simulated(epochs=2.0).run()
    assert outcome.state == "finished"
    assert [(summed.vector[0], summed.joined) for summed in begun] == [(WORKERS, 0)] * WORKERS


def test_when_all_replicas_die_the_run_ends_and_goes_on_from_its_checkpoint() -> None:
    simulation = simulated()
    for slot in range(WORKERS):
        simulation.at(4.0, lambda slot=slot: simulation.world.kill(f"worker-{slot}"))  # type: ignore[misc]
    outcome = simulation.run()
    assert (outcome.state, outcome.reason) == ("failed", LOST)
    assert outcome.seconds < 10.0
    assert outcome.left_behind == []
    step = outcome.store.run["checkpoint"]["step"]
    saved = outcome.store.files[outcome.store.run["checkpoint"]["path"]].values()
    assert step > 0
    assert len({int(files["step"][0]) for files in saved}) <= 2
    again = simulated(store=outcome.store, epochs=16.0).run()
    assert again.state == "finished"
    assert again.store.run["step"] > step


def test_who_has_not_been_given_the_model_yet_saves_none(begun: list[Summed]) -> None:
    """Nor is it the first worker's, whose model would be that of the run."""
    saved = Watcher(m.Saved)
    simulation = simulated(saved, checkpoint_s=0.05)
    world = simulation.world
    simulation.at(1.0, lambda: world.kill("worker-0"))
    simulation.request(6.0, "stop", {"checkpoint": True, "grace_s": 30.0})
    outcome = simulation.run()
    assert outcome.state == "stopped"
    assert [summed.joined for summed in begun] == [0, 0, 0, 1]
    words = [word for word in saved.messages() if word.name == "worker-0"]
    assert {bool(word.file) for word in words} == {False, True}


class _Evaluating(Checker):
    """Whether who evaluates has the model."""

    def __init__(self) -> None:
        self.has_model: list[bool] = []

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, RunEvaluation):
            self.has_model.append(process.machine.training.has_model())  # type: ignore[attr-defined]


def test_who_has_not_been_given_the_model_yet_evaluates_none(begun: list[Summed]) -> None:
    evaluating = _Evaluating()
    simulation = simulated(evaluating)
    world, asked = simulation.world, []

    def ask() -> None:
        training = getattr(world.machine("worker-0"), "training", None)
        if training is not None and not training.has_model():
            asked.append(m.Evaluate(100 + len(asked)))
            world.process("worker-0").deliver(COORDINATOR, asked[-1])

    simulation.at(2.0, lambda: world.kill("worker-0"))
    for at_s in np.arange(2.0, 5.0, 0.01):
        simulation.at(float(at_s), ask)
    simulation.request(6.0, "stop", {"checkpoint": True, "grace_s": 30.0})
    assert simulation.run().state == "stopped"
    assert asked
    assert all(evaluating.has_model)


def test_a_checkpoint_that_begins_while_all_replicas_are_away_ends_at_once() -> None:
    simulation = simulated(checkpoint_s=1000.0)
    simulation.request(3.0, "checkpoint", {})

    def kill() -> None:
        for slot in range(WORKERS):
            simulation.world.kill(f"worker-{slot}")

    simulation.at(2.95, kill)
    outcome = simulation.run()
    assert outcome.state == "failed"
    assert outcome.seconds < SAVE_S_MAX / 4


def test_the_next_coordinator_knows_who_was_left_out() -> None:
    simulation = simulated()
    world, found = simulation.world, []

    def leave_out() -> None:
        world.freeze("worker-1")
        world.machine("coordinator").groups.left_out |= {(1, 1)}

    simulation.at(3.0, leave_out)
    simulation.at(3.5, lambda: world.kill("coordinator"))
    simulation.at(6.0, lambda: found.append(set(world.machine("coordinator").groups.left_out)))
    simulation.at(6.5, lambda: world.thaw("worker-1"))
    simulation.at(9.0, lambda: found.append(set(world.machine("coordinator").groups.left_out)))
    simulation.request(10.0, "stop", {"checkpoint": True, "grace_s": 30.0})
    assert simulation.run().state == "stopped"
    assert found == [{(1, 1)}, set()]


def on_three_hosts() -> Simulation:
    hosts = tuple(config.Host(ssh=name) for name in ("h1", "h2", "h3"))
    timeouts = {"silent_s": 2.0, "host_s": 1000.0}
    return simulated(hosts=hosts, timeouts=timeouts, checkpoint_s=1000.0)


@pytest.mark.long
def test_a_group_goes_on_without_a_host_that_is_cut_off_and_with_it_again() -> None:
    simulation = on_three_hosts()
    world, found = simulation.world, []

    def look() -> None:
        coordinator = world.machine("coordinator")
        found.append((coordinator.groups.steps_done(), coordinator.groups.members))

    simulation.at(4.0, lambda: world.cut_off("agent-3"))
    for at_s in (10.0, 15.0, 40.0):
        simulation.at(at_s, look)
    simulation.at(20.0, lambda: world.join("agent-3"))
    simulation.request(45.0, "stop", {"checkpoint": True, "grace_s": 30.0})
    assert simulation.run().state == "stopped"
    (before, _), (after, without), (_, again) = found
    assert after > before
    assert without == ((0, 1), (1, 1))
    assert [slot for slot, _ in again] == [0, 1, 2]


def test_who_is_back_is_not_left_out_again_before_its_heartbeat_comes() -> None:
    simulation = on_three_hosts()
    simulation.at(4.0, lambda: simulation.world.cut_off("agent-3"))
    simulation.at(7.0, lambda: simulation.world.join("agent-3"))
    simulation.request(15.0, "stop", {"checkpoint": True, "grace_s": 30.0})
    assert simulation.run().state == "stopped"
    events = [line for line in simulation.world.trace if " event group " in line]
    assert sum("the group continues without" in line for line in events) == 1
