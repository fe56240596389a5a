"""A term and the record of its daemon are persisted together, whenever the coordinator dies."""

from __future__ import annotations

import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from dlctl.roles.coordinator.records import IssueTerm
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Simulation

EPOCHS = 12


class DiesBeforeItIsOnRecord:
    """Ends the first coordinator when it has remembered a term, and has not issued it yet."""

    def __init__(self, issued: IssueTerm) -> None:
        self.issued = issued

    def on_effect(self, process, effect):
        if effect == self.issued and process.incarnation == 1:
            process.end(-9)

    def on_message(self, process, peer, message):
        """Nothing depends on it."""


@pytest.mark.long
@pytest.mark.parametrize("name", ["worker-0", "server-0"])
def test_the_next_coordinator_issues_it_and_gives_a_newer_one_to_the_next_process(name):
    problem = Ledger(shards=2, cells=300)
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=float(EPOCHS),
        timeouts={"resend_s": 0.3},
    )  # fmt: skip
    promises = ledger_checkers(problem, EPOCHS, once=False)
    simulation = Simulation(job, problem, compute=ComputeOptions(step_s=0.05), checkers=promises)
    simulation.world.observers.insert(0, DiesBeforeItIsOnRecord(IssueTerm(name, 2)))
    kill = simulation.world.kill
    for when_s in (1.0, 5.0):
        simulation.at(when_s, lambda: kill(name))
    outcome = simulation.run(200.0)
    assert outcome.state == "finished", outcome.reason
    assert [term for issued, term in outcome.store.issued if issued == name] == [1, 2, 3]
    assert len(outcome.store.texts("recover")) == 1
