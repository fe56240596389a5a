"""Where the time of a run's daemons went, read from its directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from daemons import time_records
from daemons.time_records import LoopClock, TimesFile, WaitMeter, path_of
from dlctl.records.work_times import FOLDER, HandledTimes, LoopTimes, WorkTimes
from dlctl.runs import work_times
from dlctl.wire.machine import DeadlineReached, Received
from dlctl.wire.messages import Heard, Register

WHO = Register("run", "worker", "worker-0", 1, 7, "here", "0")


def test_what_a_loop_records_is_read_by_daemon_and_kind(tmp_path: Path) -> None:
    clock, work = LoopClock(), {"step": WorkTimes()}
    work["step"].add(0.004, 0.003, waited_s=0.001)
    clock.begin()
    with clock.handling(Received("coordinator", Heard())):
        sum(range(1000))
    with clock.handling(DeadlineReached()):
        pass
    file = TimesFile(path_of(tmp_path, WHO), clock, work)
    file.write()
    (tmp_path / FOLDER / "server-0.1.json").write_text("{}")  # Damaged: it counts as missing.
    found = work_times.read(tmp_path)
    assert set(found) == {"worker-0"}
    assert {kind: row.count for kind, row in found["worker-0"].loop.handled.items()} == {
        "Heard": 1, "DeadlineReached": 1,
    }  # fmt: skip
    assert found["worker-0"].work["step"].alone_s == pytest.approx(0.003)
    data = work_times.as_data(tmp_path)
    assert data["worker-0"]["work"]["step"]["mean_ms"] == 4.0
    assert json.dumps(data)


def test_incarnations_of_a_daemon_are_added_up(tmp_path: Path) -> None:
    for incarnation in (1, 2):
        clock = LoopClock()
        with clock.handling(DeadlineReached()):
            pass
        who = Register("run", "server", "server-0", incarnation, 7, "here", "0")
        TimesFile(path_of(tmp_path, who), clock, {}).write()
    (found,) = work_times.read(tmp_path).values()
    assert found.loop.handled["DeadlineReached"].count == 2


def test_how_the_cores_were_shared_counts_from_the_begin_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the imports of all daemons wait for each other."""
    waited_s = iter([5.0, 5.5])
    monkeypatch.setattr(time_records, "_waited_s", lambda: next(waited_s))
    clock = LoopClock()
    clock.begin()
    TimesFile(path_of(tmp_path, WHO), clock, {}).write()
    (found,) = work_times.read(tmp_path).values()
    assert found.waited_s == 0.5


def test_time_beside_the_handling_is_spread_over_the_events() -> None:
    handled = {"Push": HandledTimes(10, 0.02, 100)}
    loop = LoopTimes(handled, cpu_s=0.03, elsewhere_s=0.005, transport_s=0.005)
    assert loop.around_s == pytest.approx((0.03 - 0.015 + 0.005) / 10)
    assert LoopTimes.of_json(loop.to_json()) == loop
    assert LoopTimes().around_s == 0.0


def test_work_needs_a_core_for_the_part_of_its_time_that_it_neither_waits_nor_sleeps() -> None:
    times = WorkTimes()
    times.add(wall_s=0.010, cpu_s=0.004, waited_s=0.002)
    assert times.core_share == pytest.approx(0.5)
    assert WorkTimes().core_share == 1.0
    assert WaitMeter().waited_s() >= 0.0
