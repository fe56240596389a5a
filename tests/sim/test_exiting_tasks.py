"""A task that ends its own process is told of as what it is, and is not started for ever."""

from __future__ import annotations

import pytest
from simulated import job_file

from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.util.text import BLAMED, ENDED_BY_ITSELF

pytestmark = pytest.mark.long

LIVES_S = 12.0
"""At work, so long that the death of a process is none of its start."""


def ending(
    status: int, slots: tuple[int, ...], seconds: float, restarts_max: int = 3
) -> Simulation:
    """In a run of two workers, those of these slots end like that some time after every start."""
    job = job_file(workers=2, seconds=seconds, restarts_max=restarts_max)
    simulation = Simulation(job, LeastSquares(), compute=ComputeOptions(step_s=0.5))

    at_work: dict[tuple[str, int], float] = {}

    def look() -> None:
        now = simulation.world.timeline.now
        for slot in slots:
            process = simulation.world.process(f"worker-{slot}")
            if process.alive and simulation.store.daemons[process.name]["state"] == "running":
                since = at_work.setdefault((process.name, process.incarnation), now)
                if now - since > LIVES_S:
                    process.end(status)
        simulation.world.timeline.after(0.5, look)

    simulation.at(1.0, look)
    return simulation


def test_a_task_that_ends_its_process_fails_the_run_and_is_blamed() -> None:
    outcome = ending(3, (0, 1), 10_000.0).run(20_000.0)
    assert (outcome.state, outcome.left_behind) == ("failed", [])
    expected = f"{ENDED_BY_ITSELF} (exit 3), for the 4th time in a row: {BLAMED}"
    assert outcome.reason.startswith("no worker")
    assert expected in outcome.reason
    assert [outcome.store.daemons[f"worker-{n}"]["restarts"] for n in (0, 1)] == [3, 3]
    assert outcome.seconds < 200.0
    texts = outcome.store.texts("exit")
    assert any("exit 3, for the 2nd" in text for text in texts)


def test_one_worker_that_crashes_again_and_again_does_not_end_the_run_of_the_others() -> None:
    """Its host may have bad memory, for example."""
    outcome = ending(-11, (1,), 300.0).run(2000.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    row = outcome.store.daemons["worker-1"]
    assert row["state"] == "quarantined"
    error = "it ended by itself (killed by SIGSEGV), for the 4th time in a row"
    assert row["error"] == error
    assert row["restarts"] == 3


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("status", [-9, -15, 0])
def test_one_that_is_killed_from_outside_is_started_again_as_often_as_that_happens(
    status: int,
) -> None:
    outcome = ending(status, (1,), 200.0).run(2000.0)
    assert outcome.state == "finished"
    row = outcome.store.daemons["worker-1"]
    assert row["state"] != "quarantined"
    assert row["restarts"] > 8


def test_who_is_wanted_again_after_its_quarantine_has_all_of_its_tries() -> None:
    simulation = ending(3, (1,), 400.0)
    simulation.request(200.0, "restart", {"names": ["worker-1"]})
    outcome = simulation.run(2000.0)
    assert outcome.store.daemons["worker-1"]["restarts"] == 3 + 1 + 3
    assert len(outcome.store.texts("quarantine")) == 2
