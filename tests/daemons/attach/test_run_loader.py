"""`run.loader`: each sample once, in order, whatever torch fetches ahead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_feed import FakeFeed, Numbers, portions
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from daemons.attach.loader import Loader
from daemons.worker.data.sample_order import SampleOrder
from dlctl.errors import DlctlError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
Begin = Callable[..., FakeFeed]
DEPTHS = [(0, None), (2, 1), (2, 2), (2, 3), (2, 4)]
"""num_workers, prefetch_factor."""


def loader_of(feed: FakeFeed, dataset: Any, batch_size: int, **options: Any) -> Loader:
    order = SampleOrder(len(dataset), seed=0, shuffle=False)
    return Loader(dataset, batch_size, feed=feed, order=order, **options)


def rows_of(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def trained(feed: FakeFeed, loader: Loader, accumulate: int = 1) -> list[list[int]]:
    """The rows of each batch of a loop that runs to its end."""
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if feed.micro(of=accumulate):
            feed.step()
    loader.close()
    return batches


@pytest.mark.per_commit(8)
@pytest.mark.parametrize(("processes", "prefetch"), DEPTHS)
@pytest.mark.parametrize("batch_size", [4, 5, 40])
@pytest.mark.parametrize("refuses_ahead", [False, True])
def test_each_sample_comes_once_and_in_order(
    feed_of: Begin, batch_size: int, processes: int, prefetch: int | None, refuses_ahead: bool
):
    """Batches that divide a portion of 16, that do not, and that are larger."""
    feed = feed_of([*portions(80, 16), None], refuses_ahead=refuses_ahead)
    dataset = Numbers(80)
    loader = loader_of(feed, dataset, batch_size, num_workers=processes, prefetch_factor=prefetch)
    batches = trained(feed, loader)
    assert feed.rows() == rows_of(batches) == [*range(80)]
    assert {len(batch) for batch in batches} <= {batch_size, 80 % batch_size}


def test_the_order_is_the_runs(feed_of: Begin):
    """Two data epochs, each in an order of its own, which a batch may span."""
    feed = feed_of([*portions(20, 20, 3), *portions(20, 20, 4)])
    order = SampleOrder(20, seed=5, shuffle=True)
    loader = Loader(Numbers(20), 8, feed=feed, order=order)
    batches = trained(feed, loader)
    assert rows_of(batches) == [*order.rows(3, 0, 20), *order.rows(4, 0, 20)]
    assert [len(batch) for batch in batches] == [8, 8, 8, 8, 8]


def test_no_data_for_now_ends_a_group_early(feed_of: Begin):
    """The second lease comes only when the first is settled, as if others had to settle theirs."""
    feed = feed_of([*portions(20, 20), None, *portions(20, 20, 1)], refuses_ahead=True)
    batches = trained(feed, loader_of(feed, Numbers(20), 4), accumulate=3)
    assert feed.rows() == [*range(20), *range(20)]
    assert feed.steps == [3, 2, 3, 2]
    assert len(batches) == 10
    assert feed.returns >= 2


@pytest.mark.parametrize("processes", [0, 2])
def test_a_group_takes_what_comes_late(feed_of: Begin, processes: int):
    feed = feed_of(portions(60, 10), refuses_ahead=True)
    trained(feed, loader_of(feed, Numbers(60), 4, num_workers=processes), accumulate=3)
    assert feed.rows() == [*range(60)]
    assert feed.steps == [3] * 5


def test_less_than_a_batch_waits_for_more_but_not_for_ever(feed_of: Begin):
    feed = feed_of([*portions(10, 6), None], refuses_ahead=True)
    batches = trained(feed, loader_of(feed, Numbers(10), 8))
    assert [len(batch) for batch in batches] == [8, 2]
    assert feed.rows() == [*range(10)]


def test_groups_without_micro_wait_where_there_is_no_data(feed_of: Begin):
    """A loop that counts on its own cannot end its group early, so it gets what comes later."""
    feed = feed_of([*portions(8, 8), None, None, *portions(8, 8, 1)], refuses_ahead=True)
    loader = loader_of(feed, Numbers(8), 4)
    for number, _ in enumerate(loader):
        if number % 3 == 2:
            feed.step()
        if number == 3:
            feed.step()
    assert feed.rows() == [*range(8), *range(8)]
    assert feed.steps == [3, 1]


@pytest.mark.parametrize(("processes", "prefetch"), DEPTHS)
def test_a_break_loses_nothing(feed_of: Begin, processes: int, prefetch: int | None):
    """What torch has fetched and the loop has not had comes first in the next iteration."""
    feed = feed_of(portions(60, 12))
    loader = loader_of(feed, Numbers(60), 5, num_workers=processes, prefetch_factor=prefetch)
    rows = []
    for stop in (1, 3, 2, 100):
        for number, batch in enumerate(loader, 1):
            rows += batch.tolist()
            feed.step()
            if number == stop:
                break
    loader.close()
    assert rows == feed.rows() == [*range(60)]


def test_another_loader_goes_on_where_the_first_was_left(feed_of: Begin):
    feed = feed_of(portions(40, 20))
    first = loader_of(feed, Numbers(40), 4, num_workers=2)
    iteration = iter(first)
    assert next(iteration).tolist() == [0, 1, 2, 3]
    feed.step()
    second = loader_of(feed, Numbers(40), 8)
    assert next(iter(second)).tolist() == [*range(4, 12)]
    feed.step()
    with pytest.raises(RuntimeError, match="another one has begun"):
        next(iteration)
    trained(feed, first)
    assert feed.rows() == [*range(40)]


class Unreadable(Numbers):
    """Sample 13 cannot be read at first."""

    failures = 1

    def __getitem__(self, row: int) -> int:
        if row == 13 and self.failures:
            self.failures -= 1
            raise KeyError("sample 13")
        return row


@pytest.mark.parametrize("processes", [0, 2])
def test_an_error_of_the_dataset_is_the_users(feed_of: Begin, processes: int):
    feed = feed_of(portions(40, 10))
    dataset = Unreadable(40)
    loader = loader_of(feed, dataset, 4, num_workers=processes)
    with pytest.raises(KeyError, match="sample 13"):
        trained(feed, loader)
    assert feed.rows() == [*range(12)]
    dataset.failures = 0
    trained(feed, loader)
    assert feed.rows() == [*range(40)]


class Stops(Numbers):
    def __getitem__(self, row: int) -> int:
        raise StopIteration


def test_a_dataset_that_stops_does_not_end_the_loop_in_silence(feed_of: Begin):
    feed = feed_of(portions(8, 8))
    with pytest.raises(RuntimeError, match="StopIteration"):
        trained(feed, loader_of(feed, Stops(8), 4))


@pytest.mark.parametrize(("processes", "prefetch"), DEPTHS)
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_replica_that_leaves_finishes_what_is_begun(
    feed_of: Begin, after: int, processes: int, prefetch: int | None
):
    """Portions of 10 in batches of 4: the batch behind the second would reach into the third, so
    the loop gets a smaller one, and drops what torch has fetched beyond."""
    feed = feed_of(portions(60, 10))
    loader = loader_of(feed, Numbers(60), 4, num_workers=processes, prefetch_factor=prefetch)
    for number, _ in enumerate(loader, 1):
        feed.step()
        if number == after:
            feed.end()
    loader.close()
    assert feed.rows() == [*range(10 if after < 3 else 20)]
    assert feed.is_over


def test_a_replica_leaves_at_once_between_portions(feed_of: Begin):
    feed = feed_of(portions(60, 12))
    for number, _ in enumerate(loader_of(feed, Numbers(60), 4), 1):
        feed.step()
        if number == 3:
            feed.end()
    assert feed.rows() == [*range(12)]


def test_a_group_ends_where_a_replica_leaves(feed_of: Begin):
    feed = feed_of(portions(60, 10))
    loader = loader_of(feed, Numbers(60), 4)
    for number, _ in enumerate(loader, 1):
        if number == 2:
            feed.end()
        if feed.micro(of=4):
            feed.step()
    assert feed.rows() == [*range(10)]
    assert feed.steps == [3]


def test_a_group_without_micro_that_a_replica_leaves_with(feed_of: Begin):
    """The loop ends so that the script can make its step; if it does not, the group is lost."""
    feed = feed_of(portions(60, 8))
    loader = loader_of(feed, Numbers(60), 4)
    for number, _ in enumerate(loader, 1):
        if number == 1:
            feed.end()
    assert feed.has_begun()
    assert not feed.is_over
    assert [*loader] == []
    assert feed.is_over
    assert feed.settled == []


# ------------------------------------------------------------ arguments


def as_sum(samples: list[int]) -> torch.Tensor:
    return torch.tensor([sum(samples)])


@pytest.mark.parametrize("processes", [0, 2])
def test_arguments_of_torchs_loader_are_torchs(feed_of: Begin, processes: int):
    feed = feed_of(portions(12, 6))
    loader = loader_of(feed, Numbers(12), 3, num_workers=processes, collate_fn=as_sum)
    assert trained(feed, loader) == [[3], [12], [21], [30]]


def test_memory_is_pinned_by_torch(feed_of: Begin, monkeypatch: pytest.MonkeyPatch):
    """Without an accelerator it says that it cannot."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    feed = feed_of(portions(4, 4))
    with pytest.warns(UserWarning, match="pin_memory"):
        trained(feed, loader_of(feed, Numbers(4), 2, pin_memory=True))


class Processes(Numbers):
    """A sample is the process that reads it."""

    def __getitem__(self, row: int) -> int:
        return os.getpid()


@pytest.mark.parametrize(("persistent", "starts"), [({}, 2), ({"persistent_workers": False}, 8)])
def test_processes_stay_unless_the_user_wants_others(
    feed_of: Begin, persistent: dict[str, bool], starts: int
):
    """Two leases come whenever the loop has nothing left, so there are four passes."""
    feed = feed_of(portions(32, 4), refuses_ahead=True)
    loader = loader_of(feed, Processes(32), 2, num_workers=2, **persistent)
    pids = {pid for batch in trained(feed, loader) for pid in batch}
    assert len(pids) == starts


@pytest.mark.parametrize("processes", [0, 2])
def test_passes_leave_the_users_generator_alone(feed_of: Begin, processes: int):
    """As with one pass over torch's own loader: the dropout of a run must not depend on when its
    leases come.
    """
    torch.manual_seed(3)
    [*torch.utils.data.DataLoader(Numbers(4), 2)]
    expected = torch.rand(1)
    for size in (4, 16):
        torch.manual_seed(3)
        feed = feed_of(portions(16, size), refuses_ahead=True)
        trained(feed, loader_of(feed, Numbers(16), 2, num_workers=processes))
        assert torch.equal(torch.rand(1), expected)


def test_the_default_device_is_the_users(feed_of: Begin):
    feed = feed_of(portions(4, 4))
    with torch.device("meta"):
        batches = [*map(len, stepped(feed, loader_of(feed, Numbers(4), 2)))]
    assert batches == [2, 2]


def stepped(feed: FakeFeed, loader: Loader) -> Iterator[Any]:
    for batch in loader:
        feed.step()
        yield batch


@pytest.mark.parametrize(
    "option",
    [
        {"shuffle": True}, {"sampler": [0]}, {"batch_sampler": [[0]]}, {"drop_last": True},
        {"in_order": False}, {"batch_size": None}, {"batch_size": "16"}, {"batch_size": True},
    ],
)  # fmt: skip
def test_what_the_run_decides_is_refused_by_name(feed_of: Begin, option: dict[str, Any]):
    arguments: dict[str, Any] = {"batch_size": 2, **option}
    with pytest.raises(TypeError, match=f"{next(iter(option))}="):
        loader_of(feed_of([]), Numbers(4), arguments.pop("batch_size"), **arguments)


def test_torch_checks_the_rest(feed_of: Begin):
    with pytest.raises(ValueError, match="num_workers"):
        loader_of(feed_of([]), Numbers(4), 2, prefetch_factor=2)
    with pytest.raises(ValueError, match="batch_size=0"):
        loader_of(feed_of([]), Numbers(4), 0)


class Endless(Dataset):
    def __getitem__(self, row: int) -> int:
        return row


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize("dataset", [Endless(), Stream(), iter([1, 2])])
def test_what_cannot_be_leased_is_refused_with_another_way(feed_of: Begin, dataset: Any):
    order = SampleOrder(4, seed=0, shuffle=False)
    with pytest.raises(DlctlError) as caught:
        Loader(dataset, 2, feed=feed_of([]), order=order)
    assert "run.step(samples=n)" in str(caught.value.hint)
    assert str(caught.value.where).startswith(__file__)


def test_it_has_no_length(feed_of: Begin):
    """A progress bar would promise an end that only the run knows."""
    loader = loader_of(feed_of([]), TensorDataset(torch.arange(4)), 2)
    with pytest.raises(TypeError):
        len(loader)  # type: ignore[arg-type]


# ------------------------------------------------------------ demand


def test_data_is_wanted_before_it_is_needed(feed_of: Begin):
    """With leases that come at once the loop never waits, and never returns the model."""
    feed = feed_of(portions(160, 16), is_prompt=True)
    iteration = iter(loader_of(feed, Numbers(160), 4, num_workers=2))
    for _ in range(40):
        next(iteration)
        feed.step()
    assert feed.returns == 1, "only to begin"
