"""How far a run is and how fast it goes, as the coordinator writes it down for `status`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated import job_file

from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.sim.store import Store


def written(simulation: Simulation, until_s: float, every_s: float = 0.5) -> list[dict[str, Any]]:
    """What stands in the database from time to time."""
    rows: list[dict[str, Any]] = []
    for n in range(1, int(until_s / every_s)):
        simulation.at(n * every_s, lambda: rows.append(dict(simulation.store.run)))
    simulation.run()
    return rows


@pytest.mark.long
def test_a_run_that_ends_by_time_is_as_far_as_its_time() -> None:
    simulation = Simulation(job_file(workers=2, seconds=20.0), LeastSquares())
    rows = [row for row in written(simulation, 19.0) if row.get("ready_at") is not None]
    assert len(rows) > 30
    for row in rows:
        gone = (row["updated_at"] - row["ready_at"]) / 20.0
        assert abs(row["progress"] - gone) < 1e-9
    assert simulation.store.run["progress"] == 1.0


@pytest.mark.long
def test_how_a_worker_has_ended_is_known_when_its_coordinator_has_been_replaced() -> None:
    simulation = Simulation(job_file(workers=2, seconds=20.0), LeastSquares())
    simulation.at(5.0, lambda: simulation.world.kill("worker-1"))
    simulation.at(8.0, lambda: simulation.world.kill("coordinator"))
    ends: list[Any] = []
    for at in (7.9, 15.0):
        simulation.at(at, lambda: ends.append(simulation.store.daemons["worker-1"]["last_exit"]))
    assert simulation.run().state == "finished"
    assert ends[0]["text"] == "killed by SIGKILL"
    assert ends[1] == ends[0]


@pytest.mark.long
def test_what_a_coordinator_did_and_could_not_write_is_told_as_done_again(monkeypatch) -> None:
    simulation = Simulation(job_file(workers=2, seconds=20.0), LeastSquares())
    past = simulation.store.past
    monkeypatch.setattr(
        Store, "past", lambda self, **how: replace(past(**how), gone_s=31.0, unwritten_s=23.0)
    )
    simulation.at(8.0, lambda: simulation.world.kill("coordinator"))
    (text,) = simulation.run().store.texts("recover")
    forgotten = "the 23 s before it died are not on record: what was trained in them is trained"
    assert text.startswith(f"the coordinator is back after 31 s: {forgotten}")


def test_of_two_limits_the_one_that_is_nearer_says_how_far_it_is() -> None:
    simulation = Simulation(job_file(workers=2, seconds=1000.0, epochs=2.0), LeastSquares())
    outcome = simulation.run()
    assert outcome.store.run["progress"] == 1.0
    assert outcome.seconds < 500, "the epochs were done long before the time was over"


def test_no_rate_is_shown_before_there_is_one_and_none_jumps_about() -> None:
    """A step takes a second, a portion four: far longer than from one report to the next."""
    simulation = Simulation(
        job_file(workers=1, portion_batches=4, seconds=60.0),
        LeastSquares(),
        compute=ComputeOptions(step_s=1.0),
    )
    rates = [row.get("samples_per_s") for row in written(simulation, 60.0)]
    first = next(index for index, rate in enumerate(rates) if rate is not None)
    assert first >= 8
    assert set(rates[:first]) == {None}
    shown = [rate for rate in rates[first:] if rate is not None]
    assert len(shown) == len(rates) - first
    assert all(6.0 < rate < 10.0 for rate in shown), "8 samples a second, a fifth more or less"
