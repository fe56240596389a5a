"""Scripts that leave their training loop while the run goes on: started again, not for ever."""

from __future__ import annotations

import pytest
from training_coordinator import AtWork, sent

from dlctl.errors import DlctlError
from dlctl.problems import Problem
from dlctl.roles.coordinator.members.membership import LEAVES_EARLY_S
from dlctl.util.text import HAS_LEFT
from dlctl.wire import messages as m
from dlctl.wire.machine import Received

LIFE_S = 12.0
"""From the start of a script until it breaks: longer than a death at the start would take."""
RESTARTS_MAX = 8


def life(run: AtWork, slot: int = 1, portions: int = 0, lasts_s: float = LIFE_S) -> float:
    """One life of a script that leaves by itself; returns the pause before the next one."""
    for _ in range(portions):
        taken, term = run.lease(slot), run.worker(slot).term
        done = m.PortionDone(slot, term, taken.data_epoch, taken.portion, 2, 16, 1.0)
        assert sent(run.hear(slot, done), m.PortionNoted)
    run.wait(lasts_s)
    (shutdown,) = sent(run.hear(slot, m.Drained(f"worker-{slot}")), m.Shutdown)
    assert shutdown.ended == ""
    run.exits(slot, status=0)
    left_at, worker = run.now, run.worker(slot)
    if worker.state == "backoff":
        assert worker.retry_at is not None
        run.wait(worker.retry_at - run.now + 0.01)
    if worker.state == "starting":
        run.joins(worker)
    return round(run.now - left_at, 1)


def test_one_that_never_trains_waits_longer_each_time_and_is_given_up() -> None:
    run = AtWork(3)
    assert [life(run) for _ in range(RESTARTS_MAX)] == [0, 0.5, 1, 2, 4, 8, 16, 30]
    life(run)
    worker = run.worker(1)
    assert (run.works, worker.state) == (True, "quarantined")
    assert worker.error.startswith(HAS_LEFT)
    problem = run.problems()["worker-1"]
    assert problem["code"] == "daemon-quarantined"
    assert Problem(problem["code"], "worker-1", None, problem["facts"]).facts["error"]


def test_one_that_has_trained_for_a_while_is_started_at_once_and_begins_a_new_row() -> None:
    run = AtWork(3)
    assert [life(run) for _ in range(4)] == [0, 0.5, 1, 2]
    assert life(run, portions=1, lasts_s=LEAVES_EARLY_S + 1.0) == 0
    assert life(run) == 0.5
    assert run.worker(1).restarts == 6


def test_one_that_trains_only_for_moments_waits_longer_but_is_never_given_up() -> None:
    run = AtWork(3)
    pauses = [life(run, portions=1) for _ in range(RESTARTS_MAX + 3)]
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert run.worker(1).state == "running"
    problem = run.problems()["worker-1"]
    assert problem["code"] == "worker-crash-loop"
    assert problem["facts"]["in_row"] == len(pauses)
    assert (problem["facts"]["exit"], problem["facts"]["cause"]) == (HAS_LEFT, "left")
    run.machine.scaling.restart(["worker-1"], run.now)
    run.hear(1, m.Drained("worker-1"))
    run.exits(1, status=0)
    run.joins(run.worker(1))
    assert life(run, portions=1) == 0, "the script may have been mended"


def test_the_longest_pause_stays_after_thousands_of_starts() -> None:
    """In a run of days, of which each start is on record."""
    run = AtWork(3)
    run.worker(1).left_in_row = 5000
    assert life(run, portions=1) == 30
    assert run.worker(1).left_in_row == 5001


def test_a_run_all_of_whose_scripts_leave_without_training_fails() -> None:
    run = AtWork(1)
    for _ in range(RESTARTS_MAX + 1):
        assert run.state != "failed"
        life(run, slot=0)
    assert run.state == "failed"
    assert HAS_LEFT in run.reason


def test_a_worker_that_was_asked_to_drain_has_not_left_by_itself() -> None:
    run = AtWork(3)
    for _ in range(RESTARTS_MAX + 2):
        run.machine.scaling.restart(["worker-1"], run.now)
        run.hear(1, m.Drained("worker-1"))
        run.exits(1, status=0)
        assert run.worker(1).state == "starting"
        run.joins(run.worker(1))
    assert run.worker(1).deaths_in_row == 0


# ---------------------------------------------------------------- of guests


def with_a_guest(workers: int = 2) -> AtWork:
    """A run in which a guest trains as well, in the next slot."""
    run = AtWork(workers)
    guest, worker = f"guest-{workers}", f"worker-{workers}"
    members = run.machine.members
    for name in (guest, worker):
        daemon = members.add_invited(name, guest, f"{name} of alice")
        daemon.begin(run.now)
        run.joins(daemon)
    run.machine.notify_members()
    return run


def goes(run: AtWork, slot: int = 2) -> None:
    """The guest says goodbye."""
    guest = run.machine.members.daemons[f"guest-{slot}"]
    end = m.ProcessExited(guest.name, guest.incarnation, 0, ())
    run.machine.handle(Received(guest.name.encode(), end), run.now)


def test_the_worker_of_a_guest_that_has_gone_is_not_started_again() -> None:
    """Its script has left its loop, and the guest goes in the pause before the next start."""
    run = with_a_guest()
    life(run, slot=2)
    run.hear(2, m.Drained("worker-2"))
    run.exits(2, status=0)
    worker = run.worker(2)
    assert (worker.state, worker.alive) == ("backoff", False)
    assert worker.retry_at is not None
    goes(run)
    run.wait(worker.retry_at - run.now + 2.0)
    assert run.machine.members.get("worker-2") is None
    assert run.works


def test_a_guest_whose_worker_was_given_up_leaves_nothing_behind() -> None:
    run = with_a_guest()
    for _ in range(RESTARTS_MAX + 1):
        life(run, slot=2)
    assert run.worker(2).state == "quarantined"
    goes(run)
    assert run.machine.members.get("worker-2") is None
    with pytest.raises(DlctlError):
        run.machine.scaling.restart(["worker-2"], run.now)
    assert run.works


def test_a_run_whose_last_worker_went_with_its_guest_fails() -> None:
    """Its own worker is quarantined, and nobody is left to train."""
    run = with_a_guest(1)
    for _ in range(RESTARTS_MAX + 1):
        life(run, slot=0)
    assert (run.worker(0).state, run.works) == ("quarantined", True)
    for _ in range(2):
        life(run, slot=1)
    run.hear(1, m.Drained("worker-1"))
    run.exits(1, status=0)
    goes(run, 1)
    assert run.state == "failed"
