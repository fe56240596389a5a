"""The end of an epoch without the slowest: shares, when it is cut, and what is dropped."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Sequence

import numpy as np
import pytest

from dlctl.algorithms.base import DataEpoch
from dlctl.algorithms.methods.epoch_cut import EpochCutReplica, Options
from dlctl.roles.coordinator.pools.portions import PortionPool


class Work:
    """A lead and a pool, as the coordinator has them; a worker is done with a portion when told."""

    def __init__(self, workers: int, portions: int, epochs: float = 3.0, **options: float) -> None:
        self.lead = EpochCutReplica(Options(**options))
        self.pool = PortionPool(10 * portions, 10)
        self.pool.limit = math.ceil(epochs * portions)
        self.at_work: dict[int, tuple[int, int]] = {}
        self.done: list[tuple[int, int, int]] = []
        self.members(workers)

    def members(self, workers: int) -> None:
        self.lead.members = frozenset(range(workers))
        self._look()

    def _look(self) -> None:
        lead, pool = self.lead, self.pool
        lead.epoch = pool.standing(lead.data_epoch)
        while lead.epoch.portions and lead.cut_epoch():
            lead.data_epoch += 1
            lead.epoch = pool.standing(lead.data_epoch)
        pool.drop(before=lead.data_epoch)

    def take(self, slot: int) -> tuple[int, int] | None:
        self._look()
        if self.lead.may_lease(slot, 0) or (taken := self.pool.take(slot, 0.0)) is None:
            return None
        self.at_work[slot] = taken.data_epoch, taken.portion
        return self.at_work[slot]

    def finish(self, slot: int) -> None:
        epoch, portion = self.at_work.pop(slot)
        if self.pool.finish(epoch, portion, 0.0):
            self.lead.portion_done(slot, 1, 10, epoch)
            self.done.append((slot, epoch, portion))
        self._look()

    def done_of(self, slot: int, epoch: int) -> int:
        return sum((s, e) == (slot, epoch) for s, e, _ in self.done)

    def do(self, slot: int, portions: int) -> None:
        for _ in range(portions):
            assert self.take(slot) is not None, self.lead.may_lease(slot, 0)
            self.finish(slot)


def test_an_epoch_ends_when_three_of_four_are_done_and_the_rest_is_dropped():
    work = Work(4, 16)
    work.do(3, 1)
    assert work.take(3) is not None
    for slot in (0, 1):
        work.do(slot, 4)
        assert work.take(slot) is None
        assert work.lead.may_lease(slot, 0)
    work.do(2, 3)
    assert work.take(0) is None
    work.do(2, 1)
    assert work.lead.data_epoch == 1
    assert work.pool.done_count == 15, "all but what is under way"
    assert [work.take(slot)[0] for slot in (0, 1, 2)] == [1, 1, 1]
    work.finish(3)
    assert work.pool.done_count == 16
    assert work.take(3)[0] == 1
    assert len([slot for slot, epoch, _ in work.done if epoch == 0]) == 4 + 4 + 4 + 2


def in_time(work: Work, step_s: Sequence[float], epochs: int) -> list[list[int]]:
    """Portions that each worker has done of each epoch; a portion takes worker i step_s[i]."""
    at_work = [(0.0, slot) for slot in range(len(step_s))]
    while at_work:
        now_s = at_work[0][0]
        while at_work and at_work[0][0] == now_s:
            _, slot = heapq.heappop(at_work)
            if slot in work.at_work:
                work.finish(slot)
        for slot in set(range(len(step_s))) - {slot for _, slot in at_work}:
            if work.take(slot):
                heapq.heappush(at_work, (now_s + step_s[slot], slot))
    return [[work.done_of(slot, e) for slot in range(len(step_s))] for e in range(epochs)]


def by_rule(
    step_s: Sequence[float], portions: int, fraction: float, epochs: int
) -> list[list[int]]:
    """The same by the paper's sentence: when an epoch ends, and who has begun what before that."""
    workers, begins_s, free_s = len(step_s), 0.0, [0.0] * len(step_s)
    found = []
    for _ in range(epochs):
        shares = [portions // workers + (i < portions % workers) for i in range(workers)]
        begun_s = [max(begins_s, free) for free in free_s]
        done_s = [b + n * s for b, n, s in zip(begun_s, shares, step_s, strict=True)]
        ends_s = sorted(done_s)[math.ceil(fraction * workers) - 1]
        made = [
            max(0, min(share, math.ceil((ends_s - begun) / step)))
            for share, begun, step in zip(shares, begun_s, step_s, strict=True)
        ]
        free_s = [
            b + n * s if n else f for b, n, s, f in zip(begun_s, made, step_s, free_s, strict=True)
        ]
        begins_s = ends_s
        found.append(made)
    return found


@pytest.mark.oracle("epoch-cut", "the rule of Chilimbi 2014: who does how much of an epoch")
@pytest.mark.parametrize("fraction", [0.5, 0.75])
@pytest.mark.parametrize(
    "step_s", [(1.0, 1.137, 0.913, 5.379), (1.0, 2.713, 0.417, 1.939, 1.337, 8.957)]
)
def test_workers_of_any_speed_do_what_the_rule_says(step_s, fraction, agree):
    epochs = 6
    work = Work(len(step_s), 27, epochs=epochs, fraction=fraction)
    found = in_time(work, step_s, epochs - 1)
    agree(found, by_rule(step_s, 27, fraction, epochs - 1))
    assert np.sum(found, axis=1).max() < 27


def test_without_a_slow_one_or_with_the_whole_fraction_nothing_is_dropped():
    work = Work(3, 7, epochs=2.0, fraction=1.0)
    while not work.pool.is_finished():
        took = [work.take(slot) for slot in range(3)]
        assert any(took)
        for slot in [slot for slot in range(3) if took[slot]]:
            work.finish(slot)
    assert sorted(work.done) == sorted(set(work.done))
    assert {(epoch, p) for _, epoch, p in work.done} == {(e, p) for e in (0, 1) for p in range(7)}
    assert [sum(slot == s and e == 0 for s, e, _ in work.done) for slot in range(3)] == [3, 2, 2]


def test_what_comes_back_from_an_epoch_that_is_over_is_dropped():
    work = Work(2, 4, fraction=0.5)
    assert work.take(1) == (0, 0)
    work.do(0, 2)
    assert work.lead.data_epoch == 1
    work.pool.give_back(1)
    assert work.take(0) == (1, 0)
    assert 0 in work.pool.to_json()["complete_epochs"]


def test_after_a_death_the_others_have_its_share():
    work = Work(2, 4, fraction=1.0)
    work.do(0, 2)
    assert work.take(0) is None
    work.members(1)
    work.do(0, 2)
    assert work.lead.data_epoch == 1


def test_the_last_epoch_may_be_a_part_and_it_ends():
    work = Work(2, 4, epochs=1.5, fraction=1.0)
    for slot in (0, 1):
        work.do(slot, 2)
    work.do(0, 1)
    assert work.take(0) is None
    work.do(1, 1)
    assert work.pool.is_finished()
    assert work.take(0) is None
    assert work.take(1) is None


def test_in_the_warm_start_one_works_alone_and_has_no_share():
    work = Work(2, 4, warmstart_steps=6)
    for _ in range(6):
        assert work.take(1) is None
        work.do(0, 1)
        work.lead.steps_done += 1
    assert work.take(1) is not None


def test_the_next_coordinator_goes_on_with_the_epoch():
    work = Work(3, 9)
    work.do(0, 3)
    work.do(1, 1)
    other = EpochCutReplica(Options())
    other.resume(json.loads(json.dumps(work.lead.state())))
    assert other.state() == work.lead.state()
    other.members, other.epoch = work.lead.members, work.lead.epoch
    assert other.may_lease(0, 0)
    assert not other.may_lease(1, 0)


@pytest.mark.parametrize("fraction", [0.3, 0.75, 1.0])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_somebody_can_always_go_on_until_all_is_done(fraction, workers):
    work = Work(workers, 7, epochs=2.5, fraction=fraction)
    for step in range(1000):
        if work.pool.is_finished():
            break
        took = [slot for slot in range(workers) if slot not in work.at_work and work.take(slot)]
        assert took or work.at_work, f"all wait at {step}"
        work.finish(sorted(work.at_work)[step % len(work.at_work)])
    assert work.pool.is_finished()


def test_how_far_an_epoch_has_come():
    pool = PortionPool(100, 10)
    pool.limit = 15
    pool.take(0, 0.0)
    pool.take(1, 0.0)
    pool.finish(0, 1, 0.0)
    assert pool.standing(0) == DataEpoch(10, 8, {0: 1})
    assert pool.standing(1) == DataEpoch(5, 5, {})
    assert pool.standing(2) == DataEpoch(0, 0, {})
    pool.drop(before=1)
    assert (pool.done_count, pool.next) == (9, (1, 0))
    assert pool.standing(0) == DataEpoch(10, 0, {0: 1})
