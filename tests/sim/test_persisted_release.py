"""A disk that is full when all workers have come, and not before: nobody trains until it is on
record that they may, or the next coordinator would have them begin once more.
"""

from __future__ import annotations

import pytest
from simulated import ACCOUNT, FullAtRelease, Watcher, job_file

from dlctl.roles.coordinator.persistence import Lasting
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import LoadArrays
from dlctl.sim.checkers import AcksChecker, Book, LedgerChecker, NothingLeft, TermsChecker
from dlctl.sim.checkers.base import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares, Ledger
from dlctl.sim.simulation import Simulation
from dlctl.wire import messages as m

FULL_S = 8.5
LEASE = m.Lease(1, 0, 0, 0, 4)


class Residuals(Checker):
    """Who has loaded the residual of a checkpoint, and when."""

    def __init__(self) -> None:
        self.loaded: list[tuple[float, str]] = []

    def on_effect(self, process, effect):
        if isinstance(effect, LoadArrays) and process.name.startswith("worker"):
            self.loaded.append((process.timeline.now, process.name))


def filled(job, problem, *checkers, store=None) -> tuple[Simulation, FullAtRelease]:
    simulation = Simulation(
        job, problem, store=store, compute=ComputeOptions(step_s=0.2), checkers=checkers
    )
    return simulation, FullAtRelease(simulation, for_s=FULL_S)


@pytest.mark.parametrize("dead", [(), (COORDINATOR,), ("worker-1",), (COORDINATOR, "worker-1")])
def test_nobody_trains_before_it_is_on_record_that_all_have_come(dead):
    problem = Ledger(shards=2, cells=800)
    book, pushes = Book(problem), Watcher(m.Push)
    checkers = (book, LedgerChecker(book), AcksChecker(book), TermsChecker(), NothingLeft())
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, seconds=20.0,
        timeouts={"resend_s": 0.3, "silent_s": 6.0, "ready_s": 30.0},
    )  # fmt: skip
    simulation, full = filled(job, problem, *checkers, pushes)
    for i, name in enumerate(dead):
        simulation.at(5.0 + i, lambda name=name: simulation.world.kill(name))
    outcome = simulation.run(200.0)
    assert outcome.state == "finished", outcome.reason
    assert full.at_s < 5.0
    assert min(at_s for at_s, *_ in pushes.sent) >= full.until_s


@pytest.mark.long
def test_a_residual_is_restored_to_nobody_whose_predecessor_has_pushed_it():
    topk = ("topk", {"density": 0.1})
    first = Simulation(job_file(workers=2, epochs=5.0, compression=topk), LeastSquares()).run()
    residuals, pushes = Residuals(), Watcher(m.Push)
    job = job_file(
        workers=2, seconds=20.0, compression=topk,
        timeouts={"resend_s": 0.3, "silent_s": 6.0, "ready_s": 30.0},
    )  # fmt: skip
    simulation, full = filled(job, LeastSquares(), residuals, pushes, store=first.store)
    for at_s, name in ((5.0, COORDINATOR), (5.2, "worker-1")):
        simulation.at(at_s, lambda name=name: simulation.world.kill(name))
    assert simulation.run(200.0).state == "finished"
    assert full.at_s < 5.0
    pushed_at_s = min(at_s for at_s, name, *_ in pushes.sent if name == "worker-1")
    assert [name for at_s, name in residuals.loaded if at_s < full.at_s] == ["worker-0", "worker-1"]
    assert all(at_s < pushed_at_s for at_s, name in residuals.loaded if name == "worker-1")


def test_leases_wait_for_the_release_only_and_not_for_what_else_waits_for_room():
    lasting = Lasting()
    lasting.remembers("run", ["starting", "", None])
    lasting.written()
    lasting.remembers("run", ["running", "", 0.0])
    assert not lasting.may_leave(LEASE)
    lasting.written()
    lasting.remembers("run", ["running", "", 1.0])
    lasting.issues_term()
    assert lasting.may_leave(LEASE)
    assert not lasting.is_on_disk


def test_the_next_coordinator_of_a_run_that_is_at_work_leases_without_a_record_of_its_own():
    lasting = Lasting()
    lasting.remembers("run", ["running", "", 3.0])
    assert lasting.may_leave(LEASE)
