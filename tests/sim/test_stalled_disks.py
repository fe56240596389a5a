"""A disk that hangs is a problem that `status` shows, while the run works and while it ends. Nobody
is blamed for it, and the run goes on when the disk does.
"""

from __future__ import annotations

from typing import Any

import pytest
from simulated import ACCOUNT, job_file

from dlctl.roles.coordinator.problems import STALLED_S
from dlctl.roles.coordinator.records import StatusSnapshot
from dlctl.roles.coordinator.shutdown import DRAINING, EXIT_S, SHUTTING_DOWN
from dlctl.sim.checkers import AcksChecker, Book, Checker, LedgerChecker, NothingLeft
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Simulation

HANGS_S, HEALS_S, LIMIT_S = 3.0, 43.0, 200.0
FOREVER_S = 10_000.0
SHOWN_S = 2.5
"""From a report to the status that shows it."""


class Shown(Checker):
    """What `status` shows of the disks: (seconds, facts) of each problem."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, dict[str, Any]]] = []

    def on_effect(self, process: Any, effect: Any) -> None:
        if isinstance(effect, StatusSnapshot):
            now = process.timeline.now
            rows = [row for row in effect.run["problems"] if row["code"] == "disk-stalled"]
            self.rows += [(now, row["facts"]) for row in rows]


def begun(**stop: float) -> tuple[Simulation, Shown]:
    """A run whose disk hangs: a sync that begins then takes until `HEALS_S`."""
    problem, shown = Ledger(shards=2, cells=2000), Shown()
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, durability="disk",
        timeouts={"resend_s": 0.3, "silent_s": 6.0}, **stop,
    )  # fmt: skip
    book = Book(problem)
    checkers = (book, LedgerChecker(book), AcksChecker(book), NothingLeft(), shown)
    simulation = Simulation(job, problem, compute=ComputeOptions(step_s=0.5), checkers=checkers)
    return simulation, shown


def hang(simulation: Simulation, when_s: float, for_s: float) -> None:
    disk = simulation.world.disk
    usual_s = disk.commit_s
    simulation.at(when_s, lambda: setattr(disk, "commit_s", for_s))
    simulation.at(when_s + 1.0, lambda: setattr(disk, "commit_s", usual_s))


@pytest.mark.long
@pytest.mark.per_commit(1)
def test_a_disk_that_hangs_is_a_problem_until_it_goes_on():
    simulation, shown = begun(seconds=HEALS_S + 20.0)
    hang(simulation, HANGS_S, HEALS_S - HANGS_S)
    outcome = simulation.run(LIMIT_S)
    assert outcome.state == "finished", outcome.reason
    assert outcome.store.texts("silent") == []
    times = [at_s for at_s, _ in shown.rows]
    assert HANGS_S + STALLED_S < times[0] < HANGS_S + 1.0 + STALLED_S + SHOWN_S
    assert HEALS_S - SHOWN_S < times[-1] < HEALS_S + 1.0 + SHOWN_S
    assert {facts["limit_s"] for _, facts in shown.rows} == {STALLED_S}


@pytest.mark.per_commit(1)
def test_a_disk_that_hangs_while_a_run_ends_is_shown_until_its_servers_are_given_up():
    """Workers drain in vain, and servers that were asked to exit do not: status says why."""
    simulation, shown = begun(seconds=LIMIT_S)
    hang(simulation, HANGS_S, FOREVER_S)
    stop_s, grace_s = HANGS_S + 0.5, 5.0
    simulation.request(stop_s, "stop", {"grace_s": grace_s, "checkpoint": False})
    outcome = simulation.run(LIMIT_S)
    assert outcome.state == "stopped", outcome.reason
    assert outcome.store.texts("silent") == []
    by_step = {facts["step"]: at_s for at_s, facts in shown.rows}
    assert by_step.keys() >= {DRAINING, SHUTTING_DOWN}
    assert shown.rows[0][0] < HANGS_S + 1.0 + SHOWN_S
    assert by_step[SHUTTING_DOWN] >= stop_s + grace_s + EXIT_S - SHOWN_S
