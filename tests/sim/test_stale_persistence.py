"""Coordinators whose notes are older than what their agents know: the disk was full when those
before them decided, and they died before it could be written again.
"""

from __future__ import annotations

import pytest
from scenarios import full_disks
from seeds import finish
from simulated import ACCOUNT, job_file

from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import (
    AcksChecker,
    Book,
    LedgerChecker,
    LivenessChecker,
    NothingLeft,
    SamplesChecker,
    TermsChecker,
)
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Outcome, Simulation

pytestmark = pytest.mark.long

SECONDS, LOOK_S = 24.0, 20.0
FULL_S, FREE_S = 2.0, 6.0
DIES_AT_S = 4.0


def check_that_all_are_at_work(simulation: Simulation) -> None:
    """What the coordinator believes, against the processes that there are."""
    daemons = simulation.world.coordinator.machine.members.daemons
    assert {name: daemon.state for name, daemon in daemons.items()} == dict.fromkeys(
        daemons, "running"
    )
    newest = {name: simulation.world.process(name) for name in daemons}
    assert all(process.alive for process in newest.values())
    assert {name: process.incarnation for name, process in newest.items()} == {
        name: daemon.incarnation for name, daemon in daemons.items()
    }


def run(*kills: tuple[float, str]) -> Outcome:
    """`kills`: (seconds, name) while the disk is full; the coordinator is one of them."""
    problem = Ledger(shards=2, cells=800)
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, seconds=SECONDS,
        timeouts={"resend_s": 0.3, "silent_s": 6.0, "ready_s": 6.0},
    )  # fmt: skip
    book = Book(problem)
    checkers = (
        book, LedgerChecker(book), AcksChecker(book), TermsChecker(),
        LivenessChecker(FREE_S), NothingLeft(),
    )  # fmt: skip
    simulation = Simulation(job, problem, compute=ComputeOptions(step_s=0.2), checkers=checkers)
    world = simulation.world

    def fill(full: int) -> None:
        world.disk.full = full

    def kill(name: str) -> None:
        assert name in world.living()
        world.kill(name)

    simulation.at(FULL_S, lambda: fill(1))
    simulation.at(FREE_S, lambda: fill(0))
    simulation.at(LOOK_S, lambda: check_that_all_are_at_work(simulation))
    for when_s, name in kills:
        simulation.at(when_s, lambda name=name: kill(name))
    outcome = simulation.run(200.0)
    assert outcome.state == "finished", outcome.reason
    return outcome


@pytest.mark.per_commit(3)
@pytest.mark.parametrize("name", ["worker-1", "server-0", "server-1"])
@pytest.mark.parametrize("before_s", [0.01, 0.3, 1.9])
def test_a_process_that_no_coordinator_remembers_is_replaced(name, before_s):
    run((DIES_AT_S - before_s, name), (DIES_AT_S, COORDINATOR))


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("name", ["worker-1", "server-0"])
@pytest.mark.parametrize("again_s", [0.01, 0.5, 1.5])
def test_one_that_was_started_twice_since_the_last_note_is_replaced(name, again_s):
    """The newest is dead, and that is noted: no report of the agent's names it any more."""
    run((2.1, name), (2.3 + again_s, name), (DIES_AT_S, COORDINATOR))


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("name", ["worker-1", "server-0"])
def test_one_that_was_waited_for_when_the_disk_became_full_is_replaced(name):
    """On record: a pause before the next process, whose number is used by the time it is begun."""
    run((1.3, name), (1.7, name), (3.4, name), (DIES_AT_S, COORDINATOR))


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("name", ["worker-1", "server-0"])
def test_one_that_dies_while_there_is_no_coordinator_is_replaced(name):
    run((2.1, name), (DIES_AT_S, COORDINATOR), (DIES_AT_S + 0.2, name))


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("dies_at_s", [1.0, 2.1, 2.9])
def test_an_agent_that_no_coordinator_remembers_is_gone_on_with(dies_at_s):
    run((dies_at_s, "agent-0"), (DIES_AT_S, COORDINATOR))


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("dies_at_s", [2.1, 2.9])
def test_an_agent_that_lives_is_not_begun_again_because_no_coordinator_remembers_it(dies_at_s):
    world = run((dies_at_s, "agent-0"), (DIES_AT_S, COORDINATOR)).world
    agents = [p.incarnation for p in world.processes if p.name == "agent-0"]
    assert agents == [1, 2]


@pytest.mark.parametrize("after_s", [0.0005, 0.005, 0.015])
def test_an_agent_whose_welcome_outlives_the_coordinator_that_sent_it_registers_again(after_s):
    """It comes when the agent has asked the next one, and is taken for the answer to that."""
    link = NetworkOptions(link=SimLink(latency_s=0.02))
    simulation = begun(cells=400, epochs=1, step_s=0.1, once=False, network=link)
    world, welcomed = simulation.world, []

    def kill_when_welcomed() -> None:
        if not welcomed and world.coordinator.machine.members.daemons["agent-0"].registered:
            welcomed.append(True)
            simulation.at(world.timeline.now + after_s, lambda: world.kill(COORDINATOR))

    simulation.at(0.01, lambda: setattr(world.disk, "full", 1))
    for tick in range(1, 400):
        simulation.at(tick * 0.0005, kill_when_welcomed)
    simulation.at(FREE_S, lambda: setattr(world.disk, "full", 0))
    outcome = simulation.run(100.0)
    assert outcome.state == "finished", outcome.reason
    assert welcomed


def begun(
    cells: int, epochs: int, step_s: float, *, once: bool, network: NetworkOptions | None = None
) -> Simulation:
    """A run to the end of its epochs; `once`: every sample is taken once."""
    problem = Ledger(shards=2, cells=cells)
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=float(epochs),
        timeouts={"resend_s": 0.3},
    )  # fmt: skip
    checkers = (SamplesChecker(problem.samples, epochs, once=once), NothingLeft())
    compute = ComputeOptions(step_s=step_s)
    return Simulation(job, problem, compute=compute, network=network, checkers=checkers)


@pytest.mark.parametrize("dies_at_s", [2.5, 4.0, 5.5])
def test_a_portion_that_is_done_and_said_to_be_leased_is_not_waited_for(dies_at_s):
    simulation = begun(cells=800, epochs=8, step_s=0.1, once=False)
    disk = simulation.world.disk
    simulation.at(FULL_S, lambda: setattr(disk, "full", 1))
    simulation.at(FREE_S, lambda: setattr(disk, "full", 0))
    simulation.at(dies_at_s, lambda: simulation.world.kill(COORDINATOR))
    outcome = simulation.run(100.0)
    assert outcome.state == "finished", outcome.reason


def test_a_portion_that_its_worker_never_got_is_not_waited_for():
    """Two coordinators have answered one question, and the worker has taken the other answer."""
    simulation = begun(cells=800, epochs=8, step_s=0.1, once=True)
    world = simulation.world
    simulation.at(FULL_S, lambda: world.coordinator.machine.data.pool.take(0, FULL_S))
    outcome = simulation.run(100.0)
    assert outcome.state == "finished", outcome.reason


def test_a_batch_that_takes_long_is_not_given_to_somebody_else():
    """With true notes and nothing else to do."""
    simulation = begun(cells=48, epochs=2, step_s=35.0, once=True)
    for again_s in range(20, 2000, 90):
        simulation.at(float(again_s), lambda: simulation.world.kill(COORDINATOR))
    outcome = simulation.run(4000.0)
    assert outcome.state == "finished", outcome.reason


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(22, id="workers-drained-for-an-end-that-nobody-remembers"),
        pytest.param(44, id="an-exit-that-was-noted-and-is-not-on-record"),
        pytest.param(87, id="a-shard-that-has-served-and-nobody-remembers-it"),
        pytest.param(216, id="an-agent-that-registered-and-is-not-on-record"),
        pytest.param(303, id="workers-at-work-that-are-said-not-to-have-begun"),
        pytest.param(372, id="a-server-that-is-sent-away-before-it-has-served"),
    ],
)
def test_what_is_not_on_record_is_found_out_again(seed):
    """Each of these runs stood still for good, or failed, before that was mended."""
    finish(full_disks(seed))
