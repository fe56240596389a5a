"""What is said late, or to a coordinator that does not remember why."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Simulation
from dlctl.wire import messages as m
from dlctl.wire.machine import Received


def in_the_middle(**options: Any) -> Simulation:
    problem = Ledger(shards=2, samples=128, cells=300)
    job = job_file(2, 2, optimizer=ACCOUNT, batch_size=8, portion_batches=2, **options)
    compute = ComputeOptions(step_s=0.05, spread=0.0)
    checkers = ledger_checkers(problem, 2, once=True)
    simulation = Simulation(job, problem, compute=compute, checkers=checkers)
    assert simulation.run(0.9).state == ""
    return simulation


def tell(simulation: Simulation, message: m.Message, peer: Any) -> None:
    """The coordinator hears this; what it wants done about it is not done."""
    process = simulation.world.process(COORDINATOR)
    process.machine.handle(Received(peer, message), process.clock())


def known(simulation: Simulation, name: str) -> Daemon:
    return simulation.world.machine(COORDINATOR).members.daemons[name]


def test_a_process_that_was_replaced_does_not_answer_for_the_new_one():
    """It says that it has drained, and the new one has not got the order yet."""
    simulation = in_the_middle()
    coordinator = simulation.world.machine(COORDINATOR)
    worker = known(simulation, "worker-0")
    coordinator.scaling.restart(["worker-0"], simulation.world.process(COORDINATOR).clock())
    tell(simulation, m.Drained("worker-0"), b"another connection")
    assert not worker.drained
    assert ("drain", "worker-0") in coordinator.context.retries
    tell(simulation, m.Drained("worker-0"), worker.peer)
    assert worker.drained
    assert ("drain", "worker-0") not in coordinator.context.retries


@pytest.mark.parametrize(
    ("metrics", "works"), [({"step": 0, "portions": 0}, True), ({"checkpoint": 0}, False)]
)
def test_who_says_that_it_trains_takes_part_although_nobody_remembers_it(metrics, works):
    """Behind a barrier it may have no data left, and asks for none."""
    simulation = in_the_middle()
    worker = known(simulation, "worker-0")
    worker.asked_for_data = False
    worker.restore_state("starting")
    tell(simulation, m.Report("worker-0", 1, "fetching", "server-0", metrics), worker.peer)
    assert (worker.asked_for_data, worker.state == "running") == (works, works)


def test_what_a_worker_said_before_it_got_data_does_not_prove_that_it_has_nothing():
    """An older report may be read late: the coordinator was frozen, or the link broke."""
    simulation = in_the_middle()
    machine, worker = simulation.world.machine(COORDINATOR), known(simulation, "worker-0")
    leases, pool = machine.leases, machine.data.pool
    now = simulation.world.process(COORDINATOR).clock()
    leased = []
    while taken := pool.take(0, now):
        leased.append(taken)

    def ask(request: int) -> m.Lease:
        leases.on_request(m.LeaseRequest(0, worker.term, request, False), now)
        return leases.answered[0]

    def report(request: int, portions: int = 0) -> None:
        worker.metrics = {"portions": portions, "request": request}
        leases.on_report(worker, now)

    assert ask(1001).stop == 0
    report(1000)
    report(1001, portions=1)
    assert ask(1002).stop == 0
    report(1002)
    assert ask(1003).stop > 0
    report(1003)
    held = [key for key, slot in pool.holders.leased.items() if slot == 0]
    assert len(held) == 1, "the answer may have overtaken the report"
    *_, last = leased
    assert pool.may_finish(0, last.data_epoch, last.portion), "it may come late all the same"
