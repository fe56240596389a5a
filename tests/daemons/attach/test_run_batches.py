"""`run.batches`: a batch sampler that knows from torch's asks what was delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_feed import FakeFeed, Numbers, portions
from torch.utils.data import DataLoader

from daemons.attach.batches import Batches
from daemons.worker.data.sample_order import SampleOrder

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
Begin = Callable[..., FakeFeed]
DEPTHS = [(0, None), (1, 2), (2, 1), (2, 3)]
"""num_workers, prefetch_factor."""


def batches_of(feed: FakeFeed, samples: int, size: int, **options: Any) -> Batches:
    order = SampleOrder(samples, seed=0, shuffle=False)
    return Batches(Numbers(samples), size, feed=feed, order=order, **options)


def delivered(feed: FakeFeed) -> list[int]:
    """The rows that count as delivered."""
    pieces = [*feed.settled, *feed.begun]
    return [row for piece in pieces for row in range(piece.start, piece.stop)]


def loop(feed: FakeFeed, loader: DataLoader[Any], accumulate: int = 1) -> Iterator[list[int]]:
    """The rows that the loop has after each batch, before its step."""
    rows: list[int] = []
    while not feed.is_over:
        for batch in loader:
            rows += batch.tolist()
            yield rows
            if feed.micro(of=accumulate):
                feed.step()


@pytest.mark.per_commit(5)
@pytest.mark.parametrize(("processes", "prefetch"), DEPTHS)
@pytest.mark.parametrize("stay", [False, True])
@pytest.mark.parametrize("refuses_ahead", [False, True])
def test_what_counts_as_delivered_is_what_the_loop_has(
    feed_of: Begin, processes: int, prefetch: int | None, stay: bool, refuses_ahead: bool
):
    feed = feed_of([*portions(80, 16), None], refuses_ahead=refuses_ahead)
    loader = DataLoader(
        Numbers(80), batch_sampler=batches_of(feed, 80, 5), num_workers=processes,
        prefetch_factor=prefetch, persistent_workers=stay and processes > 0,
    )  # fmt: skip
    for rows in loop(feed, loader):
        assert delivered(feed) == rows
    assert feed.rows() == rows == [*range(80)]


@pytest.mark.parametrize(("processes", "prefetch"), DEPTHS)
def test_a_pass_that_breaks_off_loses_nothing(feed_of: Begin, processes: int, prefetch: int | None):
    feed = feed_of(portions(60, 12))
    sampler, rows = batches_of(feed, 60, 5), []
    while not feed.is_over:
        loader = DataLoader(
            Numbers(60), batch_sampler=sampler, num_workers=processes, prefetch_factor=prefetch
        )
        for number, batch in enumerate(loader):
            rows += batch.tolist()
            feed.step()
            if number == 2:
                break
    assert rows == feed.rows() == [*range(60)]


@pytest.mark.parametrize("processes", [0, 2])
def test_groups_end_where_data_does(feed_of: Begin, processes: int):
    feed = feed_of([*portions(20, 20), None, *portions(20, 20, 1)], refuses_ahead=True)
    loader = DataLoader(Numbers(20), batch_sampler=batches_of(feed, 20, 4), num_workers=processes)
    assert [*loop(feed, loader, accumulate=3)]
    assert feed.rows() == [*range(20), *range(20)]
    assert feed.steps == [3, 2, 3, 2]


@pytest.mark.parametrize(("processes", "finishes"), [(0, 10), (2, 20)])
def test_a_replica_that_leaves_finishes_what_torch_has_fetched(
    feed_of: Begin, processes: int, finishes: int
):
    """Nobody can take it back from the user's loader. Two processes have four batches more."""
    feed = feed_of(portions(60, 10), is_prompt=True)
    loader = DataLoader(Numbers(60), batch_sampler=batches_of(feed, 60, 4), num_workers=processes)
    for number, _ in enumerate(loop(feed, loader)):
        if number == 0:
            feed.end()
    assert feed.rows() == [*range(finishes)]


def test_whoever_fetches_more_says_so(feed_of: Begin):
    """As accelerate does, which has the next batch already when it hands out one."""

    def one_ahead(loader: DataLoader[Any]) -> Iterator[Any]:
        batches = iter(loader)
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            yield batch
            batch = following

    feed = feed_of(portions(12, 12))
    loader = DataLoader(Numbers(12), batch_sampler=batches_of(feed, 12, 4, ahead=1))
    rows = []
    for batch in one_ahead(loader):
        rows += batch.tolist()
        assert delivered(feed) == rows
        feed.step()
    assert feed.rows() == [*range(12)]


def test_without_torch_a_batch_is_delivered_when_it_is_given(feed_of: Begin):
    feed = feed_of(portions(12, 6))
    batches = batches_of(feed, 12, 4)
    rows = []
    while not feed.is_over:
        for batch in batches:
            rows += batch
            assert delivered(feed) == rows
            feed.step()
    assert rows == [*range(12)]


def test_a_group_that_nobody_steps_does_not_keep_the_replica(feed_of: Begin):
    feed = feed_of(portions(60, 8))
    sampler = batches_of(feed, 60, 4)
    while not feed.is_over:
        for number, _ in enumerate(DataLoader(Numbers(60), batch_sampler=sampler)):
            if number == 0:
                feed.end()
    assert feed.settled == []


def test_batches_out_of_order_are_refused(feed_of: Begin):
    feed = feed_of(portions(12, 6))
    sampler = batches_of(feed, 12, 4)
    with pytest.raises(TypeError, match="in_order="):
        iter(DataLoader(Numbers(12), batch_sampler=sampler, num_workers=1, in_order=False))
