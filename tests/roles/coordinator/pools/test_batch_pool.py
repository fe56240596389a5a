"""A batch's stragglers: who waits for data gets a backup copy of what is late."""

from __future__ import annotations

from dlctl.roles.coordinator.pools.batch_pool import BatchPool
from dlctl.roles.coordinator.pools.data_pool import Range


def batch(portions: int, *, usual_s: float | None = None) -> BatchPool:
    """One batch, after an earlier one whose only portion has taken so long."""
    pool = BatchPool(10 * portions, 10)
    if usual_s is not None:
        pool.limit = 1
        pool.take(9, -usual_s)
        pool.finish(0, 0, 0.0)
    pool.limit = portions
    return pool


def key(taken: Range | None) -> tuple[int, int] | None:
    return None if taken is None else (taken.data_epoch, taken.portion)


def test_a_backup_copy_may_be_brought_by_either_and_is_the_lease_once_the_other_is_dead() -> None:
    pool = batch(3, usual_s=1.0)
    for slot in (0, 1):
        pool.take(slot, 0.0)
    assert pool.backup(1, 9.0) is None, "it has work"
    pool.finish(0, 2, 9.0)
    assert key(pool.backup(1, 99.0)) == (0, 1)
    assert pool.backup(2, 99.0) is None, "one copy is enough"
    assert [pool.may_finish(slot, 0, 1) for slot in range(3)] == [True, True, False]
    assert pool.give_back(0) == []
    assert [pool.may_finish(slot, 0, 1) for slot in range(3)] == [False, True, False]
    assert pool.give_back(1) == [(0, 1)]
    assert key(pool.take(2, 99.0)) == (0, 1)
    assert key(pool.backup(0, 999.0)) == (0, 1)
    assert pool.finish(0, 1, 999.0)
    assert not pool.may_finish(0, 0, 1), "it comes too late"
    assert pool.is_finished()


def test_late_is_what_has_been_under_way_for_longer_than_usual() -> None:
    pool = batch(3)
    for slot, leased_at in enumerate([0.0, 0.0, 1.0]):
        pool.take(slot, leased_at)
    assert pool.backup(3, 100.0) is None, "nobody knows what is usual"
    assert pool.backup_due() is None
    pool.finish(0, 0, 2.0)
    assert pool.backup_due() == 2.0
    assert key(pool.backup(3, 2.0)) == (0, 1), "the oldest of them"
    assert pool.backup_due() == 3.0, "that one has a copy"
    assert pool.backup(0, 2.9) is None
    for slot in (3, 2, 0):
        pool.wait(slot)
    assert pool.able() == pool.idle() == [0], "the others have work"
    pool.finish(0, 1, 50.0)
    assert pool.backup_due() == 3.0, "a copy says nothing of what is usual"
    assert key(pool.backup(0, 3.0)) == (0, 2)


def test_a_copy_that_dies_with_its_worker_is_made_again() -> None:
    pool = batch(2, usual_s=1.0)
    pool.take(0, 0.0)
    assert key(pool.backup(1, 5.0)) == (0, 1)
    assert pool.backup_due() is None
    assert pool.give_back(1) == []
    assert pool.backup_due() == 1.0
    assert key(pool.backup(2, 5.0)) == (0, 1)
    assert pool.give_back(0) == [], "the copy is the lease now"
    assert key(pool.backup(1, 5.0)) == (0, 1), "and may have a copy of its own"


def test_what_a_predecessor_has_leased_becomes_late_from_when_it_is_first_looked_at() -> None:
    pool = batch(3, usual_s=2.0)
    pool.resume((0, 2), {(0, 1): 1})
    assert not pool.is_dry(10.0), "one is left"
    assert key(pool.take(0, 10.0)) == (0, 2)
    pool.finish(0, 2, 12.0)
    assert not pool.is_dry(20.0), "somebody has to look at the other"
    assert pool.backup(1, 20.0) is None, "it has work"
    assert pool.backup(0, 30.0) is None
    assert pool.is_dry(30.0)
    assert pool.backup_due() == 32.0
    assert key(pool.backup(0, 32.0)) == (0, 1)


def test_who_asks_between_two_batches_is_kept_waiting() -> None:
    pool = batch(2)
    assert pool.keeps_waiting
    assert not pool.is_dry(0.0)
    for slot in (0, 1):
        pool.take(slot, 0.0)
    assert pool.is_dry(0.0)
    pool.give_back(1)
    assert not pool.is_dry(0.0), "that of the dead"
    pool.take(0, 0.0)
    pool.finish(0, 0, 1.0)
    assert pool.is_dry(0.5)
    assert not pool.is_dry(1.0), "a copy"
    pool.finish(0, 1, 1.0)
    assert pool.is_dry(1.0)
    pool.limit = 4
    assert not pool.is_dry(1.0), "the next batch"
