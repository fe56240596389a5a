"""A disk that is full when all is done but the end of the processes: servers stay until that is on
record, because whoever takes the coordinator's place goes on with what is.
"""

from __future__ import annotations

import pytest
from simulated import ACCOUNT, FullAtEnd, Watcher, job_file

from dlctl.job.config import Host
from dlctl.roles.coordinator.persistence import Lasting
from dlctl.roles.coordinator.shutdown import EXIT_S, RECORD_S
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import AcksChecker, Book, LedgerChecker, NothingLeft, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Simulation
from dlctl.wire import messages as m

HOSTS = (Host(ssh="h1"), Host(ssh="h2"))
STOP = {"names": [], "checkpoint": True, "grace_s": 10.0, "kill": False}


def ends_on_a_full_disk(for_s, *more, hosts=(), killed=(), durability="process", epochs=2.0):
    """The simulation, and who fills its disk. more: checkers; killed: (seconds later, who) each."""
    problem = Ledger(shards=2, cells=800)
    book = Book(problem)
    checkers = (book, LedgerChecker(book), AcksChecker(book), TermsChecker(), NothingLeft(), *more)
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, hosts=hosts, epochs=epochs,
        durability=durability, timeouts={"resend_s": 0.3, "silent_s": 6.0},
    )  # fmt: skip
    simulation = Simulation(
        job, problem, compute=ComputeOptions(step_s=0.1), faults=Faults(heal_at_s=500.0),
        checkers=checkers,
    )  # fmt: skip
    return simulation, FullAtEnd(simulation, for_s, *killed)


@pytest.mark.parametrize("hosts", [(), HOSTS])
@pytest.mark.parametrize("durability", ["process", "disk", "none"])
@pytest.mark.parametrize("killed_after_s", [0.01, 2.0])
def test_the_next_coordinator_ends_a_run_whose_end_is_not_on_record(
    killed_after_s, durability, hosts
):
    """It knows only that the run was about to end, and needs all that the servers have."""
    simulation, full = ends_on_a_full_disk(
        6.0, hosts=hosts, killed=[(killed_after_s, COORDINATOR)], durability=durability
    )
    outcome = simulation.run(200.0)
    assert outcome.state == "finished", outcome.reason
    assert outcome.world.timeline.now > full.until_s
    back = [text for text in outcome.store.texts("recover") if "the coordinator is back" in text]
    assert len(back) == 1
    assert not outcome.store.states


@pytest.mark.long
@pytest.mark.parametrize("hosts", [(), HOSTS])
def test_a_run_that_is_over_waits_for_room_and_says_for_what(hosts):
    simulation, full = ends_on_a_full_disk(6.0, hosts=hosts, epochs=1000.0)
    waits: list[object] = []
    client = simulation.request(3.0, "stop", STOP)
    world = simulation.world

    def look() -> None:
        assert client.reply is not None
        waits.extend(
            [
                world.process(COORDINATOR).machine.status.waiting(world.timeline.now),
                client.reply.result,
            ]
        )

    simulation.at(7.0, look)
    outcome = simulation.run(200.0)
    assert outcome.state == "stopped", outcome.reason
    assert 3.0 < full.at_s < 5.0
    what = "the run's database, which cannot be written: no space left on device"
    recording = {"phase": "recording", "waiting": [what], "state": "stopping"}
    assert waits == [f"{what} (recording)", recording]
    assert full.until_s < world.timeline.now < full.until_s + EXIT_S
    assert not outcome.store.states


@pytest.mark.parametrize("hosts", [(), HOSTS])
def test_servers_keep_everything_if_room_does_not_come_in_time(hosts):
    """`dlctl recover` needs it. The processes end all the same."""
    orders = Watcher(m.Shutdown)
    simulation, full = ends_on_a_full_disk(100.0, orders, hosts=hosts)
    world = simulation.run(200.0).world
    assert full.at_s + RECORD_S <= world.timeline.now < full.until_s
    assert all(message.keep_state for message in orders.messages())
    assert not world.living()
    assert sorted(world.store.states) == [0, 1]


def test_the_next_coordinator_gives_up_a_disk_that_stays_full_and_nothing_is_lost():
    """It makes the last checkpoint again: nobody remembers that there is one."""
    simulation, _ = ends_on_a_full_disk(60.0, killed=[(2.0, COORDINATOR)])
    outcome = simulation.run(200.0)
    assert outcome.state == "failed"
    assert "server-0: no" in outcome.reason
    assert sorted(outcome.store.states) == [0, 1]


def test_who_waits_for_the_record_is_told_once_and_not_before():
    lasting = Lasting()
    lasting.written()
    lasting.await_all()
    assert not lasting.is_on_disk
    assert lasting.written()
    assert not lasting.written()
