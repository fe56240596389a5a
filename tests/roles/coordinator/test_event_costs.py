"""No event of a coordinator costs more in a run of more workers: calls of functions are counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from training_coordinator import AtWork

from benchmarks.coordinator import Crowd
from dlctl.roles.coordinator.records import StatusSnapshot
from dlctl.roles.coordinator.status import REPORT_S, SMALL
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Received

FEW, MANY = 20, 80


class Calls:
    count = 0


@contextmanager
def counted() -> Iterator[Calls]:
    """The calls of functions, written in Python or not, and the steps of generators."""
    calls = Calls()

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        calls.count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@pytest.fixture(scope="module")
def crowds() -> tuple[Crowd, Crowd]:
    """Runs that train, of few and of many workers."""
    few, many = Crowd(FEW), Crowd(MANY)
    for crowd in (few, many):
        crowd.start()
        crowd.train(3.0)
    return few, many


def calls_for(crowd: Crowd, message: m.Message) -> int:
    """For one event, when no status is due."""
    crowd.machine.run.status_due_at = crowd.now + 1.0
    with counted() as calls:
        crowd.machine.handle(Received(b"worker-3", message), crowd.now)
        crowd.machine.deadline()
    return calls.count


@pytest.mark.parametrize(
    "message",
    [
        m.Report("worker-3", 1, "computing", "", {"samples_per_s": 1.0, "portions": 1}),
        m.Noted("worker-3", "peers", 1),
        m.LeaseRequest(3, 1, 1, False),
        m.Register("crowd", "worker", "worker-3", 1, 9, "here", "0"),
        m.Report("worker-3", 0, "computing", "", {}),
    ],
    ids=["report", "noted", "lease", "register", "replaced"],
)
def test_an_event_takes_as_many_calls_with_four_times_as_many_workers(crowds, message) -> None:
    few, many = (calls_for(crowd, message) for crowd in crowds)
    assert few > 20, "it is counted"
    assert many <= few + 10


def test_a_status_of_a_large_run_is_not_written_at_each_of_many_changes() -> None:
    small, large = AtWork(workers=SMALL - 2), AtWork(workers=10 * SMALL)
    for run in (small, large):
        statuses = 0
        for slot in range(10):
            run.now += 0.001
            run.machine.start_daemon(run.worker(slot), run.now)
            effects = run.machine.handle(DeadlineReached(), run.now)
            statuses += sum(isinstance(effect, StatusSnapshot) for effect in effects)
        assert statuses == (10 if run is small else 0), "the first one was at the start"
    due_at = large.machine.deadline()
    assert due_at is not None
    assert large.now < due_at <= large.now + REPORT_S
    effects = large.machine.handle(DeadlineReached(), due_at)
    assert any(isinstance(effect, StatusSnapshot) for effect in effects), (
        "the last change is shown, too"
    )
