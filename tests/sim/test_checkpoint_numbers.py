"""No checkpoint gets the number of one that servers have been asked to save before."""

from __future__ import annotations

import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from dlctl.roles.coordinator.records import BeginCheckpoint, CompleteCheckpoint
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Simulation

pytestmark = pytest.mark.long

EPOCHS = 12


class DiesBeforeItIsComplete:
    """Ends the first coordinator when all have saved: of that checkpoint there is no row."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        """Of all that were begun."""

    def on_effect(self, process, effect):
        if isinstance(effect, BeginCheckpoint):
            self.numbers.append(effect.number)
        if isinstance(effect, CompleteCheckpoint) and process.incarnation == 1:
            process.end(-9)

    def on_message(self, process, peer, message):
        """Nothing depends on it."""


def test_servers_do_not_answer_for_a_checkpoint_of_the_coordinator_before():
    """They have saved under the same number, at another step: these files are elsewhere."""
    problem = Ledger(shards=2, cells=300)
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=float(EPOCHS),
        timeouts={"resend_s": 0.3}, checkpoint_s=1.0,
    )  # fmt: skip
    promises = ledger_checkers(problem, EPOCHS, once=False)
    simulation = Simulation(job, problem, compute=ComputeOptions(step_s=0.05), checkers=promises)
    dies = DiesBeforeItIsComplete()
    simulation.world.observers.insert(0, dies)
    outcome = simulation.run(200.0)
    assert outcome.state == "finished", outcome.reason
    assert len(outcome.store.texts("recover")) == 1
    assert len(dies.numbers) > 2
    assert dies.numbers == sorted(set(dies.numbers))
    for directory in outcome.store.manifests:
        assert outcome.store.verify(directory) == []
