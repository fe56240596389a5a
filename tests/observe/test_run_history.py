"""The series of a run: bounded, right over restarts and steps back, one error if damaged."""

from __future__ import annotations

import random
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from recorded import START, row

from dlctl.errors import DlctlError, NotFound
from dlctl.observe import history
from dlctl.records.series import EVALUATION, ROWS_MAX, RUN, Series
from dlctl.roles.coordinator.status import Totals
from dlctl.runs.database import RunDb


def test_a_series_stays_short_and_even_over_any_number_of_coordinators(tmp_path: Path) -> None:
    """Of two days, with a coordinator that is replaced every few hours."""
    rng = random.Random(7)
    every_s: dict[str, float] = {}
    with closing(RunDb(tmp_path, create=True)) as db:
        series, counts = Series({}, {}), []
        for second in range(0, 48 * 3600, 2):
            if rng.random() < 1e-4:
                series = Series(db.metric_counts(), every_s)
            if series.take(RUN, float(second)):
                db.add_metric(float(second), RUN, second, {})
                if series.thin(RUN):
                    db.thin_metrics(RUN)
                    every_s = dict(series.every_s)
                    counts.append(db.metric_counts()[RUN])
        steps = [found["step"] for found in db.metrics(RUN)]
    assert counts != []
    assert {count <= ROWS_MAX // 2 + 1 for count in counts} == {True}
    assert ROWS_MAX // 2 <= len(steps) <= ROWS_MAX
    gaps = sorted(after - before for before, after in pairwise(steps))
    assert gaps[-1] <= 4 * gaps[len(gaps) // 2], "the oldest are as near to each other as the rest"
    assert steps[0] < 3600


def test_totals_go_on_over_processes_of_workers_and_of_the_coordinator() -> None:
    totals = Totals({}, {})
    totals.look(0.0, is_working=True)
    totals.count("worker-0", 1, {"push_bytes": 100, "pushes": 1, "staleness_sum": 5})
    totals.count("worker-0", 1, {"push_bytes": 300, "pushes": 3, "staleness_sum": 9})
    totals.count("worker-0", 2, {"push_bytes": 50, "pushes": 1, "staleness_sum": 0})
    before = totals.look(10.0, is_working=True)
    assert (before["push_bytes"], before["pushes"], before["staleness_sum"]) == (350, 4, 9)
    after = Totals(
        before, {"worker-0": {"incarnation": 2, "metrics": {"push_bytes": 50, "pushes": 1}}}
    )
    after.count("worker-0", 2, {"push_bytes": 80, "pushes": 2, "staleness_sum": 1})
    after.count("worker-0", 2, {"push_bytes": 5, "pushes": True, "staleness_sum": "much"})
    found = after.look(1000.0, is_working=False)
    assert found == {
        "seconds": 10.0, "push_bytes": 385, "fetch_bytes": 0, "pushes": 5, "staleness_sum": 10,
    }  # fmt: skip


def test_lines_are_differences_of_what_was_counted(trained) -> None:
    found = history.read(trained().path)
    lines = found.lines()
    assert lines["samples_per_s"] == [None, *[100.0] * 10]
    assert lines["push_bytes_per_s"][1:] == [1000.0] * 10
    assert lines["staleness"] == [None, *[3.0] * 10]
    assert lines["lr"] == [0.1] * 11
    assert lines["loss"][:2] == [1.0, 1 / 11]
    assert found.of_evaluation(found.evaluations[0], "samples") == 450.0
    assert found.of_evaluation(found.evaluations[0], "seconds") == 4.5
    assert [worker.samples_per_s for worker in found.workers["worker-0"]] == [50.0]
    assert found.method == "downpour"


def test_work_that_is_counted_in_large_jumps_has_its_true_rate() -> None:
    """400 samples every 8 seconds, looked at every second; then the run goes back."""
    seconds = [float(second) for second in range(30)]
    counts = [second // 8 * 400 for second in range(26)] + [800, 800, 800, 1200]
    rates = history.rate(counts, seconds)
    assert [value for value in rates if value is not None] == [50.0, 50.0, 50.0, 400 / 3]


def test_what_a_run_went_back_behind_counts_for_time_and_not_for_steps(trained) -> None:
    rows = [row(0, 0), row(1, 40), row(2, 80), row(3, 50), row(4, 90)]
    found = history.read(trained(rows=rows).path)
    assert found.counting() == [True, True, False, True, True]
    assert found.lines()["samples_per_s"][3] is None
    assert found.counting_evaluations() == [True]
    assert found.pauses() == []


def test_the_time_between_a_stop_and_the_next_start_is_a_pause(trained) -> None:
    late = row(2, 20)
    rows = [row(0, 0), row(1, 10), (late[0] + 3600, *late[1:])]
    found = history.read(trained(rows=rows).path)
    assert found.pauses() == [(START + 1, START + 3602)]
    assert found.lines()["samples_per_s"] == [None, 100.0, 100.0]


def test_what_was_done_after_the_last_row_is_its_own_point(trained) -> None:
    totals = {"seconds": 12.0, "push_bytes": 9, "fetch_bytes": 9, "pushes": 9, "staleness_sum": 9}
    run = {"updated_at": START + 12, "totals": totals, "loss": 0.25}
    made = trained(rows=[row(0, 0), row(1, 90)], **run)
    made.run(evaluation={"accuracy": 0.75}, evaluation_step=100)
    found = history.read(made.path)
    assert (found.points[-1].step, found.points[-1].loss) == (100, 0.25)
    assert (found.evaluations[-1].step, found.evaluations[-1].metrics) == (100, {"accuracy": 0.75})


def test_evaluations_of_an_older_dlctl_are_read(trained) -> None:
    made = trained()
    made.db.add_metric(START + 7, EVALUATION, 60, {"accuracy": 0.75, "loss": 0.5})
    made.run(evaluation={"accuracy": 0.875, "step": 90}, updated_at=START + 9)
    found = history.read(made.path).evaluations
    assert [(e.step, e.metrics) for e in found] == [
        (45, {"accuracy": 0.5}), (60, {"accuracy": 0.75, "loss": 0.5}), (90, {"accuracy": 0.875}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "value", ['{"samples": 1', "[]", '{"samples": "many", "seconds": 1}', "{}"]
)
def test_a_damaged_row_is_one_error(trained, dlctl_command, value: str) -> None:
    made = trained()
    made.db._db.execute("UPDATE metric SET value = ? WHERE step = 30 AND daemon = 'run'", (value,))
    made.db.commit()
    with pytest.raises(DlctlError, match="digits-7f3a"):
        history.read(made.path)
    ended = dlctl_command("report", "digits-7f3a")
    assert (ended.code, ended.out) == (1, "")
    assert "next: dlctl checkpoint export -j digits-7f3a" in ended.err


def test_a_run_without_history_is_one_error(run_directory, dlctl_command) -> None:
    made = run_directory()
    with pytest.raises(NotFound):
        history.read(made.path)
    ended = dlctl_command("plot", "digits-7f3a")
    assert ended.code == NotFound.exit_code
    assert "next: dlctl status -j digits-7f3a" in ended.err
