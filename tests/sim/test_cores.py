"""Threads that share the cores of a simulated machine, and what handling an event costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from simulated import job_file

from dlctl.records.work_times import HandledTimes, LoopTimes
from dlctl.sim.cores import Cores, SimThread
from dlctl.sim.handling import Handling, HandlingCosts
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.process import Process
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.timeline import Timeline
from dlctl.wire.machine import DeadlineReached, Received
from dlctl.wire.messages import Heard


class Machine:
    """Some cores and threads, and when each piece of work ended."""

    def __init__(self, cores: int, threads: int, wake_s: float = 0.0) -> None:
        self.timeline = Timeline()
        self.cores = Cores(self.timeline, cores, slice_s=0.003)
        self.alive = [True] * threads
        self.threads = [
            SimThread(lambda: self.cores, lambda n=n: self.alive[n], wake_s) for n in range(threads)
        ]
        self.ended: list[tuple[int, float]] = []

    def run(self, thread: int, cpu_s: float, **more: float) -> None:
        self.threads[thread].run(
            cpu_s, lambda: self.ended.append((thread, round(self.timeline.now, 6))), **more
        )

    def finish(self) -> list[tuple[int, float]]:
        while self.timeline.step(1e6):
            pass
        return self.ended


def test_as_many_threads_as_cores_do_not_wait() -> None:
    machine = Machine(cores=2, threads=2)
    machine.run(0, 0.010)
    machine.run(1, 0.020)
    assert machine.finish() == [(0, 0.010), (1, 0.020)]


def test_threads_take_turns_of_a_slice() -> None:
    machine = Machine(cores=1, threads=2)
    machine.run(0, 0.005)
    machine.run(1, 0.004)
    # 0: 0..3 and 6..8; 1: 3..6 and 8..9.
    assert machine.finish() == [(0, 0.008), (1, 0.009)]
    assert machine.cores.used_s == pytest.approx(0.009)


def test_a_thread_that_ends_a_piece_goes_on_within_its_slice() -> None:
    machine = Machine(cores=1, threads=2)
    machine.run(0, 0.001)
    machine.run(1, 0.001)
    machine.run(0, 0.001)
    assert machine.finish() == [(0, 0.001), (0, 0.002), (1, 0.003)]


def test_what_sleeps_needs_no_core_and_holds_up_its_own_thread_alone() -> None:
    machine = Machine(cores=1, threads=2)
    machine.run(0, 0.001, sleeps_s=0.010)
    machine.run(0, 0.001)
    machine.run(1, 0.002)
    assert machine.finish() == [(1, 0.003), (0, 0.011), (0, 0.012)]


def test_a_thread_waits_while_others_have_the_cores_and_first_takes_a_while_to_wake_up() -> None:
    machine = Machine(cores=1, threads=2, wake_s=0.001)
    machine.run(0, 0.002)
    machine.run(0, 0.003)
    machine.run(1, 0.001)
    # 0: 1..4 and 5..7, awake all the time; 1: 4..5.
    assert machine.finish() == [(0, 0.003), (1, 0.005), (0, 0.007)]
    first, second = machine.threads
    assert (first.wakes, second.wakes) == (1, 1)
    assert first.waited_s == pytest.approx(0.001)
    assert second.waited_s == pytest.approx(0.003)


def test_the_work_of_a_dead_process_is_gone_and_frees_its_core() -> None:
    machine = Machine(cores=1, threads=2)
    machine.run(0, 1.0)
    machine.run(1, 0.001)
    machine.timeline.at(0.002, lambda: machine.alive.__setitem__(0, False))
    assert machine.finish() == [(1, 0.004)]


def test_costs_are_those_of_a_record_and_grow_with_the_size() -> None:
    seen = {"Heard": HandledTimes(count=100, cpu_s=0.05)}
    costs = HandlingCosts({"server": LoopTimes(handled=seen, cpu_s=0.06, transport_s=0.01)})
    heard = Received("worker-0", Heard())
    assert costs.of("server", heard) == pytest.approx(0.0005 + 0.0002)
    assert costs.of("worker", heard) > 0
    assert costs.of("server", DeadlineReached()) > costs.recorded["server"].around_s


def trained(cores: int, workers: int = 3, seed: int = 4) -> Outcome:
    job = job_file(workers, 1, algorithm=("ssp", {}), epochs=3.0)
    slow = {"Computed": HandledTimes(count=1, cpu_s=0.05)}
    costs = HandlingCosts({"worker": LoopTimes(handled=slow)})
    handling = Handling(costs, cores, lambda process: "")
    return Simulation(job, LeastSquares(), seed, handling=handling).run(600.0)


@pytest.mark.long
def test_a_run_whose_events_take_time_finishes_and_is_the_same_again() -> None:
    first, second = trained(cores=1), trained(cores=1)
    assert (first.state, first.left_behind) == ("finished", [])
    assert first.digest == second.digest
    assert np.array_equal(first.weights, second.weights)
    assert trained(cores=8).seconds < first.seconds


class Sums:
    """What `daemons/simulator/sums.py` does, with one cost for all."""

    def __init__(self, handling: Handling) -> None:
        self.handling = handling

    def transfer(self, process: Process, nbytes: int, members: int, do: Callable[[], None]) -> None:
        self.handling.thread(process).run(0.001, do, sleeps_s=0.05)

    def finish(self, process: Process, do: Callable[[], None]) -> None:
        self.handling.thread(process).run(0.001, do)


def test_a_member_that_dies_in_a_sum_that_takes_time_is_noticed() -> None:
    job = job_file(3, 0, algorithm=("allreduce", {}), epochs=4.0, restarts_max=5)
    handling = Handling(HandlingCosts(), 4, lambda process: "")
    simulation = Simulation(job, LeastSquares(), 4, handling=handling)
    simulation.world.groups.costs = Sums(handling)
    for when_s in (1.0, 1.53, 2.06):
        simulation.at(when_s, lambda: simulation.world.kill("worker-1"))
    outcome = simulation.run(600.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    assert outcome.store.daemons["worker-1"]["incarnation"] > 1
