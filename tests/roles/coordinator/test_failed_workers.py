"""What one worker reports costs that worker; the run ends if another one has the same error."""

from __future__ import annotations

import pytest
from training_coordinator import AtWork, events, layout, refused, sent

from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.problems import are_alike
from dlctl.roles.coordinator import shutdown
from dlctl.roles.coordinator.records import BeginCheckpoint
from dlctl.roles.coordinator.supervision.failure_detector import EXIT_S
from dlctl.wire import codec
from dlctl.wire import messages as m

TORN = "task.loss raised KeyError: 'size' (/home/me/train.py:7)"


def test_a_fatal_error_of_one_worker_takes_it_out_and_the_others_go_on() -> None:
    run = AtWork(3)
    held = run.lease(1)
    assert events(run.fails(1, TORN), "error") == [f"worker-1: {TORN}"]
    assert events(run.fails(1, "another one"), "error") == [], "it is said once"
    run.exits(1)
    assert (run.works, run.worker(1).state, run.worker(1).error) == (True, "quarantined", TORN)
    assert run.lease(0)[:2] == held[:2]
    problem = run.problems()["worker-1"]
    assert (problem["code"], problem["facts"]["error"]) == ("daemon-quarantined", TORN)
    run.wait(60.0)
    assert (run.state, run.worker(1).incarnation) == ("degraded", 1)


def test_nothing_that_a_failed_worker_still_does_counts() -> None:
    """Another worker does its portion, and may find out that nobody can."""
    run = AtWork(3)
    held = run.lease(1)
    assert sent(run.fails(1, TORN), m.Dismiss) == [m.Dismiss(TORN)]
    done = m.PortionDone(1, 1, held.data_epoch, held.portion, 2, 16, 1.0)
    for message in (done, m.LeaseRequest(1, 1, 1, False)):
        effects = run.hear(1, message)
        assert sent(effects, m.Message) == [m.Dismiss(TORN)]
    run.exits(1)
    assert run.lease(0) == held


def test_a_process_that_does_not_exit_after_its_error_is_killed() -> None:
    run = AtWork(3)
    run.fails(1, TORN)
    assert sent(run.wait(EXIT_S - 1.0), m.Kill) == []
    (kill,) = sent(run.wait(EXIT_S), m.Kill)[:1]
    assert (kill.name, kill.signal) == ("worker-1", 9)


@pytest.mark.parametrize("exits", [True, False])
def test_the_same_error_of_another_worker_ends_the_run(exits: bool) -> None:
    run = AtWork(4)
    run.fails(1, TORN)
    if exits:
        run.exits(1)
        run.wait(1000.0)
    run.fails(3, TORN.replace("/home/me", "/tmp/code").replace("'size'", "'width'"))
    assert run.state == "failed"
    assert run.reason.startswith("worker-1, worker-3: ")


def test_different_errors_end_the_run_with_the_last_worker() -> None:
    run = AtWork(3)
    errors = [TORN, 'cannot compute on "cuda:1": no such device', "task.loss raised E (train.py:9)"]
    for slot, error in enumerate(errors):
        assert run.state != "failed"
        run.fails(slot, error)
        run.exits(slot)
    assert (run.state, run.reason) == ("failed", f"worker-2: {errors[2]}")


def test_an_only_worker_ends_the_run_at_once() -> None:
    run = AtWork(1)
    run.fails(0, TORN)
    assert (run.state, run.reason) == ("failed", f"worker-0: {TORN}")


def test_who_is_restarted_has_not_failed_any_more() -> None:
    run = AtWork(3)
    run.fails(1, TORN)
    run.exits(1)
    run.machine.scaling.restart(["worker-1"], run.now)
    run.joins(run.worker(1))
    run.fails(2, TORN)
    run.exits(2)
    assert (run.works, run.worker(2).state) == (True, "quarantined")


def test_a_run_that_waits_for_its_workers_does_not_begin_with_fewer() -> None:
    run = AtWork(3)
    run.machine.run.released_at = None
    run.fails(1, TORN)
    assert (run.state, run.reason) == ("failed", f"worker-1: {TORN}")


def test_one_worker_does_not_turn_the_end_of_a_run_into_a_failure() -> None:
    run = AtWork(3)
    run.machine.end("finished", "2 epochs are done", run.now)
    run.fails(1, TORN)
    assert run.state == "finished"
    run.fails(2, TORN)
    assert (run.state, run.reason) == ("failed", f"worker-1, worker-2: {TORN}")


def test_who_says_that_it_evaluates_and_was_not_asked_to_is_not_waited_for_at_the_end() -> None:
    run = AtWork(3)
    run.machine.end("finished", "2 epochs are done", run.now)
    run.worker(2).phase = "evaluating"
    end = run.machine.run.shutdown
    assert end is not None
    assert end.step == shutdown.DRAINING
    run.wait(run.machine.run.job.timeouts.grace_s + 1.0)
    assert end.step != shutdown.DRAINING


def test_an_error_without_a_word_counts_too_and_one_that_is_not_fatal_is_refused() -> None:
    run = AtWork(3)
    (text,) = refused(run.fails(1, "a notice", fatal=False))
    assert "fatal" in text
    assert run.worker(1).error == ""
    run.fails(1, "")
    run.exits(1)
    assert run.worker(1).error


@pytest.mark.parametrize("released", [True, False])
def test_an_error_that_no_message_would_hold_is_cut(released: bool) -> None:
    """A tensor's type is text from the worker."""
    run = AtWork(3)
    if not released:
        run.machine.run.released_at = None
    other = Layout((TensorEntry("weight", TRAINED, (2,), "x" * 10**6, ()),))
    effects = run.hear(1, m.ModelReady("worker-1", other.to_bytes(), 64))
    assert (run.worker(1).error or run.reason).startswith("worker-1 ")
    for message in sent(effects, m.Message):
        codec.encode(message)


def test_another_process_with_the_name_of_a_worker_takes_nobody_out() -> None:
    run = AtWork(3)
    run.hear(2, m.Failed("worker-1", TORN, "", True))
    assert run.worker(1).error == ""


def test_where_workers_have_the_model_the_first_error_saves_it() -> None:
    """The next ones may fail at the same data."""
    serverless, with_servers = AtWork(2, "gossip", 0), AtWork(2)
    assert any(isinstance(effect, BeginCheckpoint) for effect in serverless.fails(1, TORN))
    assert not any(isinstance(effect, BeginCheckpoint) for effect in with_servers.fails(1, TORN))


@pytest.mark.parametrize(
    ("size", "samples", "why"),
    [(3, 64, "another model"), (2, 63, "the dataset of worker-"), (2, 64, "in another order")],
)
def test_a_worker_that_builds_something_else_is_taken_out(size, samples, why) -> None:
    run = AtWork(3)

    def builds(slot: int, size: int, samples: int, order: str) -> None:
        ready = m.ModelReady(f"worker-{slot}", layout(size).to_bytes(), samples, order=order)
        run.hear(slot, ready)

    builds(0, 2, 64, "")
    builds(1, size, samples, "cd")
    assert (run.state, why in run.worker(1).error) == ("running", True)
    builds(2, size, samples, "cd")
    assert (run.state, why in run.reason) == ("failed", True), "so the task has changed"


def test_a_layout_that_is_none_is_refused() -> None:
    run = AtWork(3)
    (text,) = refused(run.hear(1, m.ModelReady("worker-1", b"[[", 64)))
    assert "model" in text
    assert (run.state, run.worker(1).error) == ("running", "")


@pytest.mark.parametrize("released", [True, False])
def test_one_worker_that_dies_again_and_again_ends_only_a_run_that_waits_for_it(released) -> None:
    """After so many starts nobody waits for it any more."""
    run = AtWork(3)
    if not released:
        run.machine.run.released_at = None
    for _ in range(run.machine.run.job.workers.restarts_max + 1):
        run.wait(40.0)
        run.joins(run.worker(1))
        run.exits(1, -11)
    why = "it died 9 times before or soon after it was ready: killed by SIGSEGV"
    if released:
        assert (run.state, run.worker(1).state) == ("degraded", "quarantined")
        assert run.worker(1).error.startswith(why)
    else:
        assert (run.state, run.reason.startswith(f"worker-1: {why}")) == ("failed", True)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (TORN, TORN.replace("/home/me/", "/srv/x/"), True),
        (TORN, TORN.replace("KeyError: 'size'", "IndexError: 3"), True),
        (TORN, TORN.replace(":7)", ":8)"), False),
        (TORN, "no GPU", False),
        ("out of memory: 3 of 4 GiB", "out of memory: 2 of 16 GiB", True),
        ("worker-0 builds another model", "worker-12 builds another model", True),
        ("no GPU", "no memory", False),
        (TORN, "", False),
    ],
)
def test_errors_are_alike_by_the_line_of_the_task_or_else_by_their_text(one, other, alike) -> None:
    assert are_alike(one, other) is are_alike(other, one) is alike
