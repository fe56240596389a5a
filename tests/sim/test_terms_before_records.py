"""A term is persisted before the record of its daemon, and issued once, whenever the coordinator
dies.
"""

from __future__ import annotations

import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from dlctl.roles.coordinator.records import IssueTerm
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Simulation

EPOCHS = 12


class DiesAt:
    """Ends the first coordinator at this effect, or at the one that follows on it."""

    def __init__(self, issued: IssueTerm, *, is_next: bool) -> None:
        self.issued = issued
        self.is_next = is_next
        self._has_come = False

    def on_effect(self, process, effect):
        if process.incarnation == 1 and process.name == COORDINATOR:
            if self._has_come or (effect == self.issued and not self.is_next):
                process.end(-9)
            self._has_come |= effect == self.issued

    def on_message(self, process, peer, message):
        """Nothing depends on it."""


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("name", ["worker-0", "server-0"])
@pytest.mark.parametrize(
    ("is_next", "issued"),
    [(False, [1, 2, 3]), (True, [1, 3, 4])],
    ids=["not issued", "in the file"],
)
def test_the_next_coordinator_gives_a_newer_one_to_every_process(name, is_next, issued):
    """A term in the file, of a process that nobody remembers to have registered, is left out."""
    problem = Ledger(shards=2, cells=300)
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=float(EPOCHS),
        timeouts={"resend_s": 0.3},
    )  # fmt: skip
    promises = ledger_checkers(problem, EPOCHS, once=False)
    simulation = Simulation(job, problem, compute=ComputeOptions(step_s=0.05), checkers=promises)
    simulation.world.observers.insert(0, DiesAt(IssueTerm(name, 2), is_next=is_next))
    kill = simulation.world.kill
    for when_s in (1.0, 5.0):
        simulation.at(when_s, lambda: kill(name))
    outcome = simulation.run(200.0)
    assert outcome.state == "finished", outcome.reason
    assert [term for of, term in outcome.store.issued if of == name] == issued
    assert len(outcome.store.texts("recover")) == 1
