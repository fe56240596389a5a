"""What a simulation takes from a real run, and whether the error of its replay says something."""

from __future__ import annotations

import json

import pytest
from process_identity import ME

from dlctl.errors import UsageError
from dlctl.ops import calibrate, run_figures
from dlctl.records.work_times import FOLDER, SCHEMA, LoopTimes, WorkTimes
from dlctl.runs.snapshot import load

DEAD = {"pid": 2**22 + 1, "pid_start": "gone"}


def record(run, name: str, waited_s: float, used_s: float, busy_s: float | None) -> None:
    """The times of a daemon; a worker has computed for 10 s. busy_s: None in older records."""
    steps = WorkTimes()
    steps.add(10.0, 4.0, count=100)
    work = {"step": steps.to_json()} if name.startswith("worker-") else {}
    machine = {"waited_s": waited_s, "used_s": used_s, "busy_s": busy_s}
    row = {"schema": SCHEMA, "cores": 2, "loop": LoopTimes().to_json(), "work": work, **machine}
    if busy_s is None:
        del row["used_s"], row["busy_s"]
    (run.path / FOLDER).mkdir(exist_ok=True)
    (run.path / FOLDER / f"{name}.1.json").write_text(json.dumps(row))


@pytest.mark.parametrize(
    ("waited_s", "busy_s", "is_judged"),
    [
        (15.0, 20.0, True),  # The threads of the run waited for each other.
        (15.0, 30.0, False),
        (2.0, 30.0, True),
        (15.0, 10.0, True),  # Ticks are counted less exactly than what a process used.
        (15.0, None, False),
    ],
)
def test_a_run_is_judged_unless_others_had_the_cores_that_it_waited_for(
    run_directory, waited_s: float, busy_s: float | None, is_judged: bool
) -> None:
    run = run_directory()
    # It begins first, and the imports of the workers are no work of a daemon.
    record(run, "server-0", waited_s, 9.0, busy_s and busy_s + 8.0)
    record(run, "worker-0", waited_s, 5.0, busy_s)
    record(run, "worker-1", waited_s, 5.0, busy_s)
    found = calibrate.of_run(load(run.path))
    assert found.is_judged is is_judged
    assert found.worked_s == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("simulated_s", "expected"), [(100.0, 0.1), (101.0, 0.1), (125.0, 0.25), (70.0, 0.3)]
)
def test_the_expected_error_is_that_of_the_replay_but_never_small(
    simulated_s: float, expected: float
) -> None:
    errors = [
        calibrate.ReplayError("pushed bytes", 10.0, 20.0),
        calibrate.ReplayError("seconds", 100.0, simulated_s),
    ]
    assert calibrate.expected_error(errors) == pytest.approx(expected)


def test_a_run_that_is_not_over_yet_is_refused(run_directory) -> None:
    run = run_directory().run(state="running", **ME)
    record(run, "worker-0", 0.0, 5.0, 5.0)
    with pytest.raises(UsageError) as refused:
        calibrate.of_run(load(run.path))
    assert f"dlctl stop -j {run.path.name}" in str(refused.value.hint)


def test_a_run_whose_coordinator_was_killed_ended_when_it_last_wrote(run_directory) -> None:
    run = run_directory().run(
        state="running", **DEAD, started_at=90.0, ready_at=100.0, ended_at=None, updated_at=130.0,
        step=60,
    )  # fmt: skip
    record(run, "worker-0", 0.0, 5.0, 5.0)
    assert calibrate.of_run(load(run.path)).run_id == run.path.name
    figures = run_figures.of_run(run.path)
    assert (figures["start_s"], figures["seconds"]) == (10.0, 30.0)
