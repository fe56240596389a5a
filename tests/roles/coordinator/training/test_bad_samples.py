"""A run continues without so many samples of an epoch. Workers report those of their portions."""

from __future__ import annotations

import pytest
from training_coordinator import SAMPLES, AtWork, events, refused, sent

from dlctl.roles.coordinator.pools.data_pool import Range
from dlctl.roles.coordinator.training.dataset import Dataset
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect

SAID = "it is torn; 3 samples of epoch 0 could not be loaded, and data.bad_samples_max is 2"


def tolerant(workers: int = 3, **more: object) -> AtWork:
    return AtWork(workers, bad_samples_max=2, **more)  # type: ignore[arg-type]


def fails(run: AtWork, slot: int, lease: Range, *samples: int, term: int = 1) -> list[Effect]:
    """These samples of a portion could not be loaded. Every message is acknowledged."""
    effects: list[Effect] = []
    for sample in samples:
        of = lease.data_epoch, sample
        message = m.SampleFailed(slot, term, *of, "it is torn", "the traceback", lease.portion)
        effects += run.hear(slot, message)
        assert sent(effects, m.SampleNoted)[-1] == m.SampleNoted(*of)
    return effects


def test_each_sample_counts_once_in_an_epoch_whoever_could_not_load_it() -> None:
    run = tolerant()
    lease = run.lease(0)
    assert events(fails(run, 0, lease, 7), "sample") == [
        "worker-0: sample 7 could not be loaded (1 of at most 2 in epoch 0): it is torn"
    ]
    assert events(fails(run, 0, lease, 7), "sample") == []
    run.exits(0)
    assert run.lease(1) == lease, "that has the same samples"
    (text,) = events(fails(run, 1, lease, 7, 9), "sample")
    assert "sample 9 " in text
    fails(run, 0, lease, 11)
    assert run.works, "that process is not there any more"
    rest = [run.lease(2) for _ in range(4)]
    assert [lease.data_epoch for lease in rest] == [0, 0, 0, 1]
    assert "2 in epoch 1)" in events(fails(run, 2, rest[-1], 9), "sample")[0]


def test_who_reports_one_too_many_is_taken_out_and_all_of_its_reports_with_it() -> None:
    run = tolerant()
    lease = run.lease(1)
    effects = fails(run, 1, lease, 1, 2, 3)
    assert events(effects, "error") == [f"worker-1: {SAID}"]
    run.exits(1)
    assert (run.works, run.worker(1).error) == (True, SAID)
    assert run.lease(0) == lease
    assert "sample 1 " in events(fails(run, 0, lease, 1), "sample")[0]
    assert run.works


@pytest.mark.parametrize("workers", [1, 2])
def test_if_nobody_can_load_them_the_run_ends_with_the_error_and_the_count(workers: int) -> None:
    run = tolerant(workers)
    for slot in range(workers):
        assert run.works
        fails(run, slot, run.lease(slot), 1, 2, 3)
        run.exits(slot)
    names = ", ".join(f"worker-{slot}" for slot in range(workers))
    assert (run.state, run.reason) == ("failed", f"{names}: {SAID}")


def test_who_ends_the_run_with_that_drains_as_all_others_do() -> None:
    """Without servers it may be the only one that has the model."""
    run = tolerant(1)
    lease = run.lease(0)
    effects = fails(run, 0, lease, 1, 2, 3)
    assert (len(sent(effects, m.Drain)), sent(effects, m.Dismiss)) == (1, [])
    done = m.PortionDone(0, 1, lease.data_epoch, lease.portion, 2, 16, 1.0)
    assert len(sent(run.hear(0, done), m.PortionNoted)) == 1
    assert sent(run.hear(0, m.LeaseRequest(0, 1, 1, False)), m.Dismiss) == []


def test_a_sample_of_a_portion_that_the_worker_does_not_have_is_refused() -> None:
    run = tolerant()
    mine, other = run.lease(1), run.lease(0)
    for lease in (other, mine._replace(data_epoch=1), mine._replace(portion=2**62)):
        (text,) = refused(fails(run, 1, lease, 5))
        assert f"portion {lease.portion} of epoch {lease.data_epoch}" in text
    done = m.PortionDone(1, 1, mine.data_epoch, mine.portion, 2, 16, 1.0)
    run.hear(1, done)
    assert len(refused(fails(run, 1, mine, 5))) == 1, "that comes after the portion is done"
    assert events(fails(run, 0, other, 5), "sample"), "none of them has counted"


@pytest.mark.parametrize(
    ("dataset", "most"),
    [(Dataset(SAMPLES), SAMPLES), (Dataset(40, clients=(30, 40, 50)), 120)],
)
def test_a_sample_that_the_dataset_does_not_have_is_refused(dataset: Dataset, most: int) -> None:
    method = "fedavg" if dataset.clients else "downpour"
    run = tolerant(method=method, dataset=dataset)
    lease = run.lease(1)
    for sample in (most, 2**63 - 1):
        (text,) = refused(fails(run, 1, lease, sample))
        assert f" {most} samples" in text
    assert events(fails(run, 1, lease, most - 1), "sample")


def test_a_task_may_choose_the_samples_of_an_epoch_from_a_larger_dataset() -> None:
    run = tolerant()
    run.machine.data._order = "digest of its first epoch"
    assert events(fails(run, 1, run.lease(1), 10 * SAMPLES), "sample")


def test_more_samples_than_the_portion_has_are_refused() -> None:
    run = AtWork(3, bad_samples_max=1000)
    lease = run.lease(1)
    effects = fails(run, 1, lease, *range(20))
    assert len(events(effects, "sample")) == lease.stop - lease.start == 16
    assert len(refused(effects)) == 4
    assert " 16 " in refused(effects)[0]


def test_a_stream_has_no_samples_that_may_fail() -> None:
    run = tolerant(dataset=Dataset(shards=2))
    (text,) = refused(fails(run, 1, run.lease(1), 0))
    assert " 0 " in text


def test_a_report_that_comes_again_after_a_restart_of_the_coordinator_is_believed() -> None:
    """Also of a portion that another coordinator has leased: its records may be stale."""
    run = tolerant()
    lease = run.lease(1)
    pool = run.machine.data.pool
    pool.resume(pool.next, {(lease.data_epoch, lease.portion): 1})  # type: ignore[arg-type]
    assert events(fails(run, 1, lease, 5), "sample")
