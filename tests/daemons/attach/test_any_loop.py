"""Whatever leases a loop gets, and whenever it breaks off or its replica leaves."""

from __future__ import annotations

import itertools

from fake_feed import FakeFeed, Numbers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from daemons.attach.batches import Batches
from daemons.attach.loader import Loader
from daemons.worker.data.sample_order import SampleOrder
from dlctl.wire.messages import Lease

SIZES = st.lists(st.one_of(st.none(), st.integers(1, 9)), max_size=8)
"""Of portions, in order; None: there is none when the loop asks."""
EVENTS = st.dictionaries(st.integers(0, 20), st.sampled_from(["break", "end"]), max_size=4)
"""Batch -> what happens behind it."""


def leases(sizes: list[int | None]) -> list[Lease | None]:
    made: list[Lease | None] = []
    start = 0
    for number, size in enumerate(sizes):
        made.append(size and Lease(0, number, 0, start, start + size))
        start += size or 0
    return made


@given(
    sizes=SIZES, events=EVENTS, batch_size=st.integers(1, 12), accumulate=st.integers(1, 4),
    refuses_ahead=st.booleans(), samples_itself=st.booleans(),
)  # fmt: skip
def test_every_portion_is_trained_once_in_order_or_not_at_all(
    sizes: list[int | None],
    events: dict[int, str],
    batch_size: int,
    accumulate: int,
    refuses_ahead: bool,
    samples_itself: bool,
):
    feed = FakeFeed(leases(sizes), refuses_ahead=refuses_ahead)
    samples = sum(filter(None, sizes))
    order = SampleOrder(samples, seed=0, shuffle=False)
    dataset = Numbers(samples)
    loader: Loader | DataLoader
    if samples_itself:
        batches = Batches(dataset, batch_size, feed=feed, order=order)
        loader = DataLoader(dataset, batch_sampler=batches)
    else:
        loader = Loader(dataset, batch_size, feed=feed, order=order)
    rows, counter = [], itertools.count()
    while not feed.is_over:
        for batch in loader:
            rows += batch.tolist()
            event = events.get(next(counter))
            if event == "end":
                feed.end()
            if feed.micro(of=accumulate):
                feed.step()
            if event == "break":
                break
    feed.close()
    assert rows == [*range(len(rows))]
    if "end" not in {events[n] for n in events if n < next(counter)}:
        assert len(rows) == samples
    ends = {0, *itertools.accumulate(filter(None, sizes))}
    settled = feed.rows()
    assert settled == rows[: len(settled)]
    assert len(rows) in ends, "a portion is partly delivered"
