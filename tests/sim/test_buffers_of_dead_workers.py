"""The average of buffers is of the workers that are at work."""

from __future__ import annotations

import pytest
from simulated import job_file

from dlctl.roles.protocol.context import EXIT_POISONED
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import WithBuffers
from dlctl.sim.simulation import Outcome, Simulation


def simulation_of(workers: int) -> Simulation:
    job = job_file(workers=workers, epochs=8.0)
    return Simulation(job, WithBuffers(samples=512), compute=ComputeOptions(step_s=0.1))


def slots_at_the_end(outcome: Outcome) -> list[int]:
    """Whose buffers the average is of."""
    assert outcome.state == "finished", outcome.store.texts("state")
    return sorted(outcome.world.machine("server-0").serving.buffers._latest)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_scale_down_it_is_of_those_that_are_left(workers: int) -> None:
    simulation = simulation_of(workers=4)
    simulation.request(4.0, "scale", {"workers": workers})
    assert slots_at_the_end(simulation.run()) == list(range(workers))


@pytest.mark.long
def test_a_worker_in_quarantine_has_no_part_in_it() -> None:
    simulation = simulation_of(workers=3)

    def poison() -> None:
        worker = simulation.world.process("worker-1")
        worker.exit_code = EXIT_POISONED
        worker.end(EXIT_POISONED)

    simulation.at(4.0, poison)
    assert slots_at_the_end(simulation.run()) == [0, 2]


@pytest.mark.long
def test_all_who_are_there_at_the_end_have_their_part_in_it() -> None:
    assert slots_at_the_end(simulation_of(workers=4).run()) == [0, 1, 2, 3]
