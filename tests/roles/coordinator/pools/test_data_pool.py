"""What every supply of data does, whichever kind it is: each portion is done once."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from dlctl.job.clients import Cohort, epoch_samples
from dlctl.roles.coordinator.pools.batch_pool import BatchPool
from dlctl.roles.coordinator.pools.counting import CountingPool
from dlctl.roles.coordinator.pools.data_pool import DONE, RETURNED, DataPool, Range
from dlctl.roles.coordinator.pools.holders import Key
from dlctl.roles.coordinator.pools.portions import ClientPool, PortionPool
from dlctl.roles.coordinator.pools.streams import StreamPool

SLOTS = 3
CLIENTS = (5, 9, 2, 7, 4)
SHARDS = (21, 0, 40, 8)
"""Samples of a stream's shards."""


def portions() -> DataPool:
    return PortionPool(43, 10, limit=12)


def batches() -> DataPool:
    return BatchPool(43, 10, limit=10)


def clients(owners: int) -> DataPool:
    pool = ClientPool(
        epoch_samples(CLIENTS, Cohort(3)), 3, sizes=CLIENTS, passes=1, seed=1, owners=owners
    )
    pool.limit = 9
    return pool


def stream() -> DataPool:
    return StreamPool(len(SHARDS), 8, 4, 2 * sum(SHARDS))


def counting() -> DataPool:
    """It has no end of its own."""
    pool = CountingPool(10)
    pool.limit = 12
    return pool


POOLS: dict[str, Callable[[], DataPool]] = {
    "portions": portions,
    "batches": batches,
    "clients": lambda: clients(0),
    "clients of their own": lambda: clients(SLOTS),
    "stream": stream,
    "counting": counting,
}
every_pool = pytest.mark.parametrize("kind", POOLS)


class Work:
    """A pool and its workers, of which each has any number of portions at a time."""

    def __init__(self, kind: str, seed: int) -> None:
        self.new, self.rng, self.now = POOLS[kind], random.Random(seed), 0.0
        self.pool = self.new()
        self.held: dict[int, list[Range]] = {slot: [] for slot in range(SLOTS)}
        self.done: Counter[Key] = Counter()
        """How often a portion was done first, without those of a stream that are empty."""
        self.record: dict[Key, Any] = {}

    def any_of(self, slot: int) -> Range:
        return self.rng.choice(self.held[slot])

    def takes(self, slot: int) -> Range | None:
        taken = self.pool.take(slot, self.now) or self.pool.backup(slot, self.now)
        if taken is not None:
            self.held[slot].append(taken)
        return taken

    def finishes(self, slot: int, portion: Range) -> bool:
        """Whether that is news."""
        if portion in self.held[slot]:
            self.held[slot].remove(portion)
        key, end = portion[:2], self.end_in(portion)
        if not self.pool.may_finish(slot, *key):
            return False
        self.pool.finish(*key, self.now, end)
        if end != portion.start:
            self.done[key] += 1
        return True

    def end_in(self, portion: Range) -> int:
        """The end of the stream's shard, if it is in this portion, or before."""
        if not isinstance(self.pool, StreamPool) or SHARDS[portion.shard] >= portion.stop:
            return -1
        return max(SHARDS[portion.shard], portion.start)

    def dies(self, slot: int) -> None:
        self.held[slot] = []
        self.pool.give_back(slot)

    def keeps(self) -> None:
        """The changes are on record."""
        for epoch, portion, standing in self.pool.take_changes():
            if standing is None:
                self.record.pop((epoch, portion), None)
            else:
                self.record[epoch, portion] = json.loads(json.dumps(standing))

    def another_coordinator(self) -> None:
        self.keeps()
        next_, self.pool = self.pool.next, self.new()
        self.pool.resume(next_, self.record)

    def resumes(self) -> None:
        """From a checkpoint: nobody has anything."""
        saved, self.pool = json.loads(json.dumps(self.pool.to_json())), self.new()
        self.held, self.record = {slot: [] for slot in range(SLOTS)}, {}
        self.pool.restore(saved)

    def to_the_end(self) -> None:
        for _ in range(500):
            if self.pool.is_finished():
                return
            for slot in range(SLOTS):
                if self.held[slot] or self.takes(slot):
                    self.finishes(slot, self.held[slot][0])
            self.now += 1.0
        raise AssertionError("no portion is left, and the run is not at its end")


def undisturbed(kind: str) -> set[Key]:
    work = Work(kind, 0)
    work.to_the_end()
    return set(work.done)


@every_pool
@pytest.mark.parametrize("seed", range(25))
def test_every_portion_is_done_once_whatever_happens(kind: str, seed: int) -> None:
    """Workers that prefetch, give back or die, and coordinators that do, in any order."""
    work = Work(kind, seed)
    what = ["take", "finish", "die", "idle", "keep", "coordinator", "resume"]
    for _ in range(300):
        if work.pool.is_finished():
            break
        work.now += work.rng.random()
        slot = work.rng.randrange(SLOTS)
        match work.rng.choices(what, [9, 9, 1, 0.5, 2, 1, 0.3])[0]:
            case "take":
                work.takes(slot)
            case "finish" if work.held[slot]:
                work.finishes(slot, work.any_of(slot))
            case "die":
                work.dies(slot)
            case "idle":
                work.held[slot] = []
                work.pool.give_back(slot, lives=True)
            case "keep":
                work.keeps()
            case "coordinator":
                work.another_coordinator()
            case "resume":
                work.resumes()
    for slot in range(SLOTS):
        work.dies(slot)
    work.to_the_end()
    assert set(work.done.values()) == {1}
    if kind != "stream":  # Which of its portions come last depends on who reads.
        assert set(work.done) == undisturbed(kind)


@every_pool
def test_who_has_a_portion_may_finish_it_once(kind: str) -> None:
    work = Work(kind, 1)
    taken = work.takes(0)
    assert taken is not None
    key = taken[:2]
    assert work.pool.holds(0)
    assert not work.pool.holds(1)
    assert [work.pool.may_finish(slot, *key) for slot in range(SLOTS)] == [True, False, False]
    assert work.finishes(0, taken)
    assert not work.pool.holds(0)
    assert not work.pool.may_finish(0, *key)
    assert not work.pool.finish(*key, work.now)


@every_pool
@pytest.mark.parametrize("order", [1, -1])
def test_a_slot_may_have_many_and_finishes_them_in_any_order(kind: str, order: int) -> None:
    """A loop that asks on demand, and prefetches."""
    work = Work(kind, 1)
    taken = [portion for _ in range(4) if (portion := work.takes(0)) is not None]
    assert len(taken) >= 2
    for portion in taken[::order]:
        assert work.pool.holds(0)
        assert work.finishes(0, portion)
    assert not work.pool.holds(0)


@every_pool
@pytest.mark.parametrize("lives", [False, True])
def test_what_is_given_back_is_leased_before_anything_else(kind: str, lives: bool) -> None:
    work = Work(kind, 1)
    mine = [portion for _ in range(2) if (portion := work.takes(0)) is not None]
    back = work.pool.give_back(0, lives=lives)
    assert back == [portion[:2] for portion in sorted(mine)]
    assert not work.pool.holds(0)
    assert [work.pool.may_finish(0, *key) for key in back] == [lives] * len(back)
    again = [work.takes(0) for _ in back]
    assert again == sorted(mine)
    assert work.pool.give_back(1) == []


@every_pool
def test_the_report_of_a_live_worker_counts_although_its_portion_was_given_back(kind: str) -> None:
    work = Work(kind, 1)
    taken = work.takes(0)
    assert taken is not None
    work.pool.give_back(0, lives=True)
    assert work.finishes(0, taken)
    assert work.takes(0) != taken, "it is done"


@every_pool
def test_one_that_stops_early_keeps_nobody_from_the_end(kind: str) -> None:
    """Its loop is over: it has given back what it had, and asks for nothing more."""
    work = Work(kind, 1)
    for _ in range(3):
        work.takes(2)
    work.dies(2)
    work.to_the_end()
    assert set(work.done.values()) == {1}


@every_pool
def test_changes_are_told_once_and_the_next_pool_is_what_they_say(kind: str) -> None:
    work = Work(kind, 1)
    for slot in (0, 1, 2, 0):
        work.takes(slot)
    work.finishes(0, work.held[0][0])
    work.dies(1)
    work.keeps()
    assert work.pool.take_changes() == []
    states = [state for (_, portion), state in work.record.items() if portion >= 0]
    assert RETURNED in states
    following = work.new()
    following.resume(work.pool.next, work.record)
    assert following.holders.leased == work.pool.holders.leased
    assert list(following.holders.returned) == list(work.pool.holders.returned)
    assert following.to_json() == work.pool.to_json()
    assert all(following.may_finish(9, *key) for key in following.holders.leased), (
        "the records may be stale"
    )


@every_pool
def test_a_checkpoint_has_what_is_done_and_nothing_of_who_has_what(kind: str) -> None:
    work = Work(kind, 1)
    for slot in range(SLOTS):
        work.takes(slot)
    work.finishes(1, work.held[1][0])
    saved = json.loads(json.dumps(work.pool.to_json()))
    after = work.new()
    after.restore(saved)
    assert after.to_json() == saved
    assert after.epochs_done() == work.pool.epochs_done()
    assert after.progress() == work.pool.progress()
    assert after.holders.leased == {}
    kept = {(epoch, portion): state for epoch, portion, state in after.take_changes()}
    assert all(state == DONE for (_, portion), state in kept.items() if portion >= 0)


@every_pool
def test_nobody_is_kept_waiting_while_there_is_something(kind: str) -> None:
    work = Work(kind, 1)
    for _ in range(100):
        is_dry = work.pool.is_dry(work.now)
        taken = [work.takes(slot) for slot in range(SLOTS)]
        assert not (is_dry and any(taken))
        if not any(taken):
            assert is_dry == work.pool.keeps_waiting
            break


@every_pool
def test_who_has_its_share_of_what_is_left_does_not_prefetch(kind: str) -> None:
    work = Work(kind, 1)
    assert work.pool.may_prefetch(0, SLOTS)
    while work.pool.may_prefetch(0, SLOTS) and work.takes(0) is not None:
        pass
    shared = kind != "clients of their own"  # These are nobody else's.
    assert (work.takes(1) is not None) or not shared
    work.to_the_end()


@every_pool
def test_progress_goes_from_nothing_to_all(kind: str) -> None:
    work = Work(kind, 1)
    assert work.pool.progress() == 0.0
    seen, leased = [0.0], [work.pool.samples_leased()]
    while not work.pool.is_finished():
        for slot in range(SLOTS):
            if work.takes(slot) is not None:
                work.finishes(slot, work.held[slot][0])
        seen.append(work.pool.progress() or 0.0)
        leased.append(work.pool.samples_leased())
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert leased[-1] > leased[0]
    assert any(character.isdigit() for character in work.pool.amount_done())
