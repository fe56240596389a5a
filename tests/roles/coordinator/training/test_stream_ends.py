"""Where a stream's shard ends is said by the workers that read it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from training_coordinator import AtWork, refused, sent

from dlctl.roles.coordinator.training.dataset import Dataset
from dlctl.wire import messages as m


class Streamed(AtWork):
    """Two shards; worker-0 has samples [0, 16) of shard 0, worker-1 those of shard 1."""

    def __init__(self) -> None:
        super().__init__(2, dataset=Dataset(shards=2))
        for slot in (0, 1):
            self.asks(slot)

    def asks(self, slot: int, *ends: int) -> m.Lease:
        self.number = getattr(self, "number", 0) + 1
        effects = self.hear(slot, m.LeaseRequest(slot, 1, self.number, False, ends))
        (lease,) = sent(effects, m.Lease)
        return lease

    def ends(self) -> list[int]:
        pool = self.machine.data.pool
        return [shard.end for shard in pool.epochs.open[0].shards]


@pytest.mark.parametrize(
    "ends",
    [(0, 0, 0), (0, 0, 5), (0, 1, 17), (1, 1, 0), (0, 2, 5), (0, 1, 2**62)],
    ids=["none", "foreign", "behind", "later", "unknown", "far"],
)
def test_the_end_of_a_shard_that_the_worker_does_not_read_there_is_not_believed(ends) -> None:
    run = Streamed()
    run.asks(1, *ends)
    assert run.ends() == [-1, -1]
    assert run.works


@pytest.mark.parametrize("end", [0, 5, 16])
def test_the_end_in_the_workers_own_portion_is_believed(end: int) -> None:
    run = Streamed()
    lease = run.asks(1, 0, 1, end)
    assert run.ends() == [-1, end]
    assert lease.shard == 0, "nothing behind the end is leased"


@pytest.mark.parametrize("end", [17, 2**62, -2])
def test_a_portion_in_which_the_shard_cannot_end_is_not_done_with_that(end: int) -> None:
    run = Streamed()
    done = m.PortionDone(1, 1, 0, 1, 1, 5, 1.0, {}, end)
    effects = run.hear(1, done)
    assert (len(refused(effects)), sent(effects, m.PortionNoted), run.ends()) == (1, [], [-1, -1])
    right = m.PortionDone(1, 1, 0, 1, 1, 5, 1.0, {}, 5)
    assert len(sent(run.hear(1, right), m.PortionNoted)) == 1
    assert run.ends() == [-1, 5]


def test_the_next_coordinator_believes_who_has_the_portion_according_to_its_records() -> None:
    run = Streamed()
    pool = run.machine.data.pool
    shards = {(0, -2): [0, 1, 0, -1], (0, -3): [0, 1, 0, -1]}
    pool.resume((0, 0), {(0, 0): 0, (0, 1): 1, **shards})
    run.asks(1, 0, 1, 5)
    assert run.ends() == [-1, 5]


def test_an_end_at_the_boundary_of_two_portions_is_believed_of_who_has_either() -> None:
    run = Streamed()
    assert [run.asks(0), run.asks(0)][-1].start == 32
    run.asks(0, 0, 0, 48)
    assert run.ends() == [48, -1]


def test_what_is_held_elsewhere_costs_nothing_when_an_end_is_reported() -> None:
    """A message has room for thousands of ends."""
    run = Streamed()
    pool = run.machine.data.pool
    asked = 0

    class Counted(dict[tuple[int, int], int]):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            nonlocal asked
            asked += 1
            return super().__iter__()

    pool.holders._leased = Counted(pool.holders._leased)
    pool.on_end(1, 0, 1, 17)
    assert (asked, run.ends()) == (0, [-1, -1])
