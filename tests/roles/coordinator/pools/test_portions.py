"""Every sample is offered once per epoch, whoever dies on the way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlctl.model.flat import slice_bounds
from dlctl.roles.coordinator.pools.portions import PortionPool


def drain(pool: PortionPool) -> list[tuple[int, int]]:
    """Lease and finish everything; what was leased, in order."""
    leased = []
    while (taken := pool.take(0, 0.0)) is not None:
        leased.append((taken.data_epoch, taken.portion))
        assert pool.finish(taken.data_epoch, taken.portion, 0.0)
    return leased


@given(st.integers(1, 500), st.integers(1, 100))
def test_the_portions_of_an_epoch_cover_the_dataset(samples: int, portion: int) -> None:
    pool = PortionPool(samples, portion)
    pool.limit = pool.per_epoch
    ranges = [pool.take(0, 0.0) for _ in range(pool.per_epoch)]
    assert pool.take(0, 0.0) is None
    covered = [i for r in ranges if r is not None for i in range(r.start, r.stop)]
    assert covered == list(range(samples))
    assert all(0 < r.stop - r.start <= portion for r in ranges if r is not None)


def test_portions_of_a_dead_worker_are_leased_first() -> None:
    pool = PortionPool(100, 10)
    for slot in (0, 1, 0):
        pool.take(slot, 0.0)
    assert pool.give_back(0) == [(0, 0), (0, 2)]
    order = [pool.take(1, 0.0) for _ in range(3)]
    assert [r.portion for r in order if r is not None] == [0, 2, 3]


def test_a_portion_is_done_once() -> None:
    pool = PortionPool(100, 10)
    pool.take(0, 0.0)
    assert pool.finish(0, 0, 0.0)
    assert not pool.finish(0, 0, 0.0)
    assert not pool.finish(0, 5, 0.0), "it was never leased"
    assert not pool.finish(7, 0, 0.0)
    assert pool.done_count == 1


def test_a_portion_that_went_back_and_is_done_all_the_same_is_not_leased_again() -> None:
    pool = PortionPool(30, 10)
    pool.limit = 3
    pool.take(0, 0.0)
    pool.give_back(0)
    assert pool.finish(0, 0, 0.0)
    assert drain(pool) == [(0, 1), (0, 2)]


@given(st.data())
def test_whatever_happens_every_portion_is_done_exactly_once(data: st.DataObject) -> None:
    pool = PortionPool(40, 10)
    pool.limit = 8
    held: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    finished = []
    for _ in range(data.draw(st.integers(0, 60))):
        slot = data.draw(st.sampled_from(sorted(held)))
        what = data.draw(st.sampled_from(["take", "finish", "die"]))
        if what == "take" and (taken := pool.take(slot, 0.0)) is not None:
            held[slot].append((taken.data_epoch, taken.portion))
        elif what == "finish" and held[slot]:
            key = held[slot].pop(0)
            finished += [key] if pool.finish(*key, 0.0) else []
        elif what == "die":
            pool.give_back(slot)
            held[slot] = []
    for slot in held:
        pool.give_back(slot)
    finished += drain(pool)
    assert sorted(finished) == [(epoch, p) for epoch in range(2) for p in range(4)]
    assert pool.is_finished()


@given(st.integers(0, 7), st.integers(1, 8))
def test_a_restored_pool_goes_on_where_it_was(done: int, limit: int) -> None:
    before, after = PortionPool(40, 10), PortionPool(40, 10)
    before.limit = after.limit = limit
    for _ in range(min(done, limit)):
        taken = before.take(0, 0.0)
        assert taken is not None
        before.finish(taken.data_epoch, taken.portion, 0.0)
    saved = before.to_json()
    after.restore(saved)
    assert after.done_count == before.done_count
    assert drain(after) == drain(before)


@given(st.data())
def test_a_pool_is_what_its_notes_say(data: st.DataObject) -> None:
    """Whenever its coordinator dies: the next one has nothing else."""
    pool = PortionPool(30, 10)
    pool.limit = 9
    notes: dict[tuple[int, int], int] = {}
    for _ in range(data.draw(st.integers(0, 30))):
        slot = data.draw(st.integers(0, 2))
        what = data.draw(st.sampled_from(["take", "finish", "die", "note"]))
        if what == "take":
            pool.take(slot, 0.0)
        elif what == "finish":
            pool.finish(data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2)), 0.0)
        elif what == "die":
            pool.give_back(slot)
        else:
            write_down(notes, pool)
    write_down(notes, pool)
    next_pool = PortionPool(30, 10)
    next_pool.limit = 9
    next_pool.resume(pool.next, notes)
    assert next_pool.done_count == pool.done_count
    assert next_pool.to_json() == pool.to_json()
    for slot in range(3):
        assert next_pool.give_back(slot) == pool.give_back(slot)
    assert drain(next_pool) == drain(pool)


def write_down(notes: dict[tuple[int, int], int], pool: PortionPool) -> None:
    for epoch, portion, standing in pool.take_changes():
        notes.pop((epoch, portion), None)
        if standing is not None:
            notes[epoch, portion] = standing


@given(st.integers(0, 1000), st.integers(1, 40))
def test_slices_are_contiguous_and_nearly_equal(size: int, parts: int) -> None:
    bounds = [slice_bounds(size, parts, i) for i in range(parts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    lengths = [hi - lo for lo, hi in bounds]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("batch_size", [1, 3, 7])
@pytest.mark.parametrize(("samples", "portion_samples"), [(1, 5), (100, 100), (100, 7), (23, 3)])
def test_the_steps_and_samples_of_the_first_portions_add_up(samples, portion_samples, batch_size):
    pool = PortionPool(samples, portion_samples)
    lengths = [hi - lo for lo, hi in map(pool.bounds, range(pool.per_epoch))]
    for portion in range(pool.per_epoch + 1):
        assert pool.samples_before(portion) == sum(lengths[:portion])
        steps = sum(-(-length // batch_size) for length in lengths[:portion])
        assert pool.steps_before(portion, batch_size) == steps
