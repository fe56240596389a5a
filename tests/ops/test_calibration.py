"""What a simulation takes from a real run, and whether the error of its replay says something."""

from __future__ import annotations

import json

import pytest
from process_identity import ME

from dlctl.errors import UsageError
from dlctl.ops import calibrate, run_figures
from dlctl.ops.calibrate import Timing
from dlctl.ops.simulate import Replay
from dlctl.records.work_times import FOLDER, SCHEMA, LoopTimes, WorkTimes
from dlctl.runs.snapshot import load
from dlctl.sim.request import SimulationRequest

DEAD = {"pid": 2**22 + 1, "pid_start": "gone"}


def record(run, name: str, waited_s: float) -> None:
    """The times of a daemon; a worker has computed for 10 s."""
    steps = WorkTimes()
    steps.add(10.0, 4.0, count=100)
    work = {"step": steps.to_json()} if name.startswith("worker-") else {}
    row = {
        "schema": SCHEMA, "cores": 2, "loop": LoopTimes().to_json(), "work": work,
        "waited_s": waited_s,
    }  # fmt: skip
    (run.path / FOLDER).mkdir(exist_ok=True)
    (run.path / FOLDER / f"{name}.1.json").write_text(json.dumps(row))


def test_a_run_says_for_how_much_of_their_work_its_workers_waited(run_directory) -> None:
    run = run_directory()
    record(run, "server-0", 9.0)
    record(run, "worker-0", 1.0)
    record(run, "worker-1", 5.0)
    found = calibrate.of_run(load(run.path))
    assert found.worked_s == pytest.approx(20.0)
    assert found.waited_share == pytest.approx(0.3)
    assert Replay("r", [], 0.1, found.waited_share).is_judged
    assert not Replay("r", [], 0.1, 0.31).is_judged


@pytest.mark.parametrize(
    ("replayed_s", "undelayed_s", "busy", "expected"),
    [
        (100.0, 50.0, 0.5, 0.05),
        (112.0, 50.0, 0.4, 0.13),
        (88.0, 50.0, 0.4, 0.13),
        (100.0, 44.0, 0.4, 0.13),
        (100.0, 50.0, 0.74, 0.13),
    ],
)
def test_the_expected_error_has_the_replay_the_waits_and_the_load_and_is_never_small(
    replayed_s: float, undelayed_s: float, busy: float, expected: float
) -> None:
    errors = [
        calibrate.ReplayError("pushed bytes", 10.0, 20.0),
        calibrate.ReplayError("seconds", 100.0, replayed_s),
    ]
    job = Timing.of({"machines": 1, "cores": 2, "used_s": 100.0 * busy}, 50.0, undelayed_s)
    replay = Timing(replayed_s, replayed_s, 0.5)
    assert calibrate.expected_error(errors, job, replay) == pytest.approx(expected)


def test_threads_take_as_long_to_wake_up_as_half_of_what_a_replay_does_not_explain(
    run_directory,
) -> None:
    run = run_directory()
    record(run, "server-0", 1.0)
    record(run, "worker-0", 2.0)
    record(run, "worker-1", 4.0)
    waits = {
        "worker": {"seconds": 2.0, "wakes": 1000},
        "server": {"seconds": 3.0, "wakes": 1000},
        "agent": {"seconds": 0.0, "wakes": 0},
    }
    found = calibrate.of_run(load(run.path)).waking(waits)
    assert found.wake_s == {"worker": pytest.approx(0.002), "server": 0.0}
    assert found.applied(SimulationRequest(directory="")).wake_s == found.wake_s


def test_a_run_that_is_not_over_yet_is_refused(run_directory) -> None:
    run = run_directory().run(state="running", **ME)
    record(run, "worker-0", 0.0)
    with pytest.raises(UsageError) as refused:
        calibrate.of_run(load(run.path))
    assert f"dlctl stop -j {run.path.name}" in str(refused.value.hint)


def test_a_run_whose_coordinator_was_killed_ended_when_it_last_wrote(run_directory) -> None:
    run = run_directory().run(
        state="running", **DEAD, started_at=90.0, ready_at=100.0, ended_at=None, updated_at=130.0,
        step=60,
    )  # fmt: skip
    record(run, "worker-0", 0.0)
    assert calibrate.of_run(load(run.path)).run_id == run.path.name
    figures = run_figures.of_run(run.path)
    assert (figures["start_s"], figures["seconds"]) == (10.0, 30.0)
