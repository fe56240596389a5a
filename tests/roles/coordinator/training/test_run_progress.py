"""How far a run is, when it has finished, and when it is evaluated."""

from __future__ import annotations

import math
from typing import Any

import pytest
from leased import PORTION, Leased

from dlctl.job.config import Evaluation
from dlctl.roles.coordinator.training.dataset import Dataset
from dlctl.wire import messages as m


def trained(portions: int, slot: int = 0, **more: Any) -> Leased:
    run = Leased(**more)
    run.release()
    trains(run, portions, slot)
    return run


def trains(run: Leased, portions: int, slot: int = 0) -> None:
    for _ in range(portions):
        run.done(slot, run.asks(slot))


# ---------------------------------------------------------------- what is counted


def test_the_loss_is_a_running_mean_and_the_newest_portion_has_a_tenth() -> None:
    run = Leased()
    run.release()
    run.done(0, run.asks(0), loss_sum=32.0, metric_sums={"seen": [16.0, 16]})
    assert (run.progress.loss, run.progress.metrics) == (2.0, {"seen": 1.0})
    run.done(0, run.asks(0), loss_sum=48.0, metric_sums={"seen": [32.0, 16]})
    assert run.progress.loss == pytest.approx(2.1)
    assert run.progress.metrics["seen"] == pytest.approx(1.1)


@pytest.mark.parametrize("loss_sum", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_leaves_the_mean_as_it_was(loss_sum: float) -> None:
    run = trained(1)
    before = run.progress.loss
    run.done(0, run.asks(0), loss_sum=loss_sum)
    assert (run.progress.loss, run.progress.steps) == (before, 4)


def test_a_portion_without_samples_says_nothing_of_the_loss() -> None:
    run = Leased()
    run.release()
    run.done(0, run.asks(0), steps=0, samples=0, loss_sum=0.0)
    assert (run.progress.loss, run.progress.samples) == (None, 0)


@pytest.mark.parametrize(
    "said",
    [[math.nan, 16], [math.inf, 16], [1.0, 17], [1.0, 0], "1", [1.0, 2, 3], 1.0, [1, 16], None],
)
def test_only_numbers_of_as_many_samples_as_there_were_are_means(said: Any) -> None:
    run = Leased()
    run.release()
    run.done(0, run.asks(0), metric_sums={"odd": said, "good": [8.0, 16]})
    assert run.progress.metrics == {"good": 0.5}


# ---------------------------------------------------------------- when it is enough


@pytest.mark.parametrize(
    ("stop", "portions", "reason"),
    [
        ({"epochs": 1.0}, 4, "1 epochs are done"),
        ({"epochs": 1.5}, 6, "1.5 epochs are done"),
        ({"steps": 5}, 3, "0.75 epochs are done"),
        ({"samples": 33}, 3, "0.75 epochs are done"),
        ({"steps": 100, "samples": 16}, 1, "0.25 epochs are done"),
    ],
)
def test_the_first_condition_ends_the_run_after_whole_portions(stop, portions, reason) -> None:
    run = trained(portions - 1, **stop)
    assert run.progress.enough(0.0) == ""
    trains(run, 1)
    assert run.progress.enough(0.0) == reason
    assert run.progress.fraction() == 1.0


def test_a_run_of_seconds_ends_with_them_and_they_count_from_the_release() -> None:
    run = Leased(seconds=10.0)
    assert (run.progress.enough(99.0), run.progress.deadline()) == ("", None)
    run.now = 5.0
    run.release()
    assert run.progress.deadline() == 15.0
    assert run.progress.enough(14.9) == ""
    assert run.progress.enough(15.0).startswith("10 ")
    assert run.progress.fraction() is None, "its data has no end"


def test_a_run_without_a_limit_of_its_data_goes_on() -> None:
    run = trained(9, target="loss < 1")
    assert (run.progress.enough(0.0), run.progress.fraction()) == ("", None)


def test_the_steps_and_samples_of_clients_are_counted_when_they_are_done() -> None:
    clients = Dataset(48, clients=(8, 16, 24))
    options = {"clients_per_round": 2}
    run = Leased(clients, "fedavg", options=options, steps=3)
    run.release()
    run.done(0, run.asks(0), steps=2, samples=8)
    assert (run.progress.enough(0.0), run.progress.fraction()) == ("", 2 / 3)
    run.done(0, run.asks(0), steps=1, samples=8)
    assert run.progress.enough(0.0).startswith("3 ")
    run = Leased(clients, "fedavg", options=options, samples=9)
    run.release()
    run.done(0, run.asks(0), steps=1, samples=9)
    assert run.progress.enough(0.0).startswith("9 ")


def test_a_stream_ends_with_the_samples_of_the_run_and_fails_if_it_has_none() -> None:
    run = trained(2, dataset=Dataset(shards=1), samples=32)
    assert run.progress.enough(0.0).startswith("32 ")
    run = Leased(Dataset(shards=1))
    run.release()
    run.done(0, run.asks(0), steps=0, samples=0, loss_sum=0.0, end=0)
    assert "samples" in run.progress.failed()


def test_a_driven_method_ends_when_it_says_so() -> None:
    run = Leased(Dataset(PORTION), "sandblaster", epochs=100.0)
    assert run.progress.failed() == ""
    run.release()
    run.done(0, run.asks(0))
    assert run.progress.enough(0.0) == "", "a batch is done, which is an epoch"
    assert run.progress.fraction() is None
    assert run.lead.driven is not None
    run.lead.driven.on_result(m.VectorResult(0, 0, 9, ()), 0.0)
    assert "lost" in run.progress.failed()


# ---------------------------------------------------------------- evaluations


def test_an_evaluation_is_due_once_after_so_many_steps() -> None:
    run = trained(1, evaluation=Evaluation(every_steps=4))
    assert not run.progress.evaluation_due()
    trains(run, 1)
    assert [run.progress.evaluation_due() for _ in range(2)] == [True, False]
    trains(run, 3)
    assert [run.progress.evaluation_due() for _ in range(2)] == [True, False]
    assert run.progress.evaluated_at == 10, "counted from where it began, late or not"


def test_an_evaluation_is_due_once_after_so_many_epochs() -> None:
    run = trained(3, evaluation=Evaluation(every_epochs=1.0))
    assert not run.progress.evaluation_due()
    trains(run, 1)
    assert [run.progress.evaluation_due() for _ in range(2)] == [True, False]


def test_a_resumed_run_counts_the_evaluations_from_where_it_resumes() -> None:
    before = trained(3, evaluation=Evaluation(every_steps=4))
    run = Leased(evaluation=Evaluation(every_steps=4))
    run.progress.restore(before.progress.to_json())
    run.progress.begin()
    run.release()
    assert not run.progress.evaluation_due()
    trains(run, 1)
    assert not run.progress.evaluation_due()
    trains(run, 1)
    assert run.progress.evaluation_due()


def test_without_an_interval_or_data_nothing_is_due() -> None:
    never = Evaluation(every_epochs=0.0)
    assert not trained(8, evaluation=never).progress.evaluation_due()
    run = trained(0, evaluation=Evaluation(every_steps=1))
    run.data._pool = None
    run.progress.steps = 10
    assert not run.progress.evaluation_due()
    assert (run.progress.epochs_done(), run.progress.fraction()) == (0.0, None)


# ---------------------------------------------------------------- persisted


def test_the_next_coordinator_goes_on_with_all_of_it() -> None:
    every = Evaluation(every_steps=4)
    run = trained(3, evaluation=every)
    run.done(0, run.asks(0), loss_sum=160.0, metric_sums={"seen": [8.0, 16]})
    assert run.progress.evaluation_due()
    following = Leased(memory=run.memory(), evaluation=every)
    found = following.progress
    assert (found.steps, found.samples, found.loss) == (8, 64, pytest.approx(1.9))
    assert following.progress.metrics == {"seen": 0.5}
    assert following.progress.evaluated_at == 8
    assert not following.progress.evaluation_due()
    assert following.lead.side.steps_done == 8
    assert following.progress.to_json() == run.progress.to_json()
