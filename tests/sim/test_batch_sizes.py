"""Hosts with batches of their own size: every sample once, and steps count as they are made."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from dlctl.job.config import Host
from dlctl.roles.protocol.effects import Compute
from dlctl.sim.checkers.base import Checker
from dlctl.sim.faults import Faults
from dlctl.sim.objectives import Ledger
from dlctl.sim.process import Process
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire.machine import Effect

HOSTS = (Host(ssh="h1", workers=1, batch_size=16), Host(ssh="h2", workers=2))


class Sizes(Checker):
    """Agent -> the sizes of the steps of its workers."""

    def __init__(self) -> None:
        self.of: dict[str, set[int]] = {}

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Compute):
            self.of.setdefault(process.agent, set()).add(effect.step_samples)


def run(faults: Faults, **more: Any) -> tuple[Outcome, Sizes]:
    problem, sizes = Ledger(shards=2, samples=1024, cells=300), Sizes()
    job = job_file(
        workers=3, servers=2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, hosts=HOSTS,
        timeouts={"silent_s": 3.0, "host_s": 20.0}, **more,
    )  # fmt: skip
    checkers = ledger_checkers(problem, 2, once=faults == Faults()) if "epochs" in more else ()
    simulation = Simulation(job, problem, seed=3, faults=faults, checkers=(*checkers, sizes))
    return simulation.run(), sizes


@pytest.mark.long
@pytest.mark.parametrize("faults", [Faults(), Faults(kills=2)], ids=["none", "two deaths"])
def test_each_host_cuts_portions_by_its_own_size(faults: Faults) -> None:
    outcome, sizes = run(faults, epochs=2.0)
    assert outcome.state == "finished"
    assert sizes.of == {"agent-1": {16}, "agent-2": {4}}
    run_row = outcome.store.run
    assert run_row["samples"] == 2 * 1024
    assert 2 * 1024 / 16 < run_row["step"] < 2 * 1024 / 4


def test_a_run_of_so_many_steps_counts_those_that_were_made() -> None:
    outcome, _ = run(Faults(), steps=150)
    assert outcome.state == "finished"
    states = outcome.store.texts("state")
    assert any("steps are done" in text for text in states), states
    assert 150 <= outcome.store.run["step"] < 150 + 40, "those of the portions under way"
