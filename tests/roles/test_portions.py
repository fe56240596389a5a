"""Every sample is offered once per epoch, whoever dies on the way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlctl.flat import slice_bounds
from dlctl.messages import Lease
from dlctl.roles.coordinator.portions import Lateness, PortionPool
from dlctl.roles.worker.leases import Portions
from dlctl.runs.best import Target


def drain(pool: PortionPool) -> list[tuple[int, int]]:
    """Lease and finish everything; what was leased, in order."""
    leased = []
    while (taken := pool.take(0)) is not None:
        leased.append((taken.data_epoch, taken.portion))
        assert pool.finish(taken.data_epoch, taken.portion)
    return leased


@given(st.integers(1, 500), st.integers(1, 100))
def test_the_portions_of_an_epoch_cover_the_dataset(samples: int, portion: int) -> None:
    pool = PortionPool(samples, portion)
    pool.limit = pool.per_epoch
    ranges = [pool.take(0) for _ in range(pool.per_epoch)]
    assert pool.take(0) is None
    covered = [i for r in ranges if r is not None for i in range(r.start, r.stop)]
    assert covered == list(range(samples))
    assert all(0 < r.stop - r.start <= portion for r in ranges if r is not None)


def test_portions_of_a_dead_worker_are_leased_first() -> None:
    pool = PortionPool(100, 10)
    for slot in (0, 1, 0):
        pool.take(slot)
    assert pool.release(0) == [(0, 0), (0, 2)]
    order = [pool.take(1) for _ in range(3)]
    assert [r.portion for r in order if r is not None] == [0, 2, 3]


def test_a_backup_copy_may_be_brought_by_either_and_is_the_lease_once_the_other_is_dead() -> None:
    pool = PortionPool(20, 10)
    pool.limit = 2
    for slot in (0, 1):
        pool.take(slot)
    assert pool.without_copy(1) == [], "it has work"
    pool.finish(0, 1)
    assert pool.without_copy(1) == [(0, 0)]
    assert pool.copy(1, (0, 0)) == (0, 0, 0, 10, -1)
    assert pool.without_copy(2) == [], "one copy is enough"
    assert [pool.may_finish(slot, 0, 0) for slot in range(3)] == [True, True, False]
    assert pool.release(0) == []
    assert [pool.may_finish(slot, 0, 0) for slot in range(3)] == [False, True, False]
    assert pool.release(1) == [(0, 0)]
    taken = pool.take(2)
    assert taken is not None
    pool.copy(0, (0, 0))
    assert pool.finish(0, 0)
    assert not pool.may_finish(0, 0, 0), "it comes too late"
    assert pool.is_finished()


def test_late_is_what_has_been_under_way_for_longer_than_usual() -> None:
    lateness = Lateness()
    for portion, leased_at in enumerate([0.0, 0.0, 1.0]):
        lateness.leased((0, portion), leased_at)
    assert lateness.first([(0, 1)], 100.0) is None, "nobody knows what is usual"
    lateness.done((0, 0), 2.0, copied=False)
    assert lateness.deadline([(0, 1), (0, 2)]) == 2.0
    assert lateness.first([(0, 2)], 2.9) is None
    assert lateness.first([(0, 2), (0, 1)], 3.0) == (0, 1)
    lateness.done((0, 1), 50.0, copied=True)
    assert lateness.deadline([(0, 2)]) == 3.0, "a copy says nothing of what is usual"
    assert lateness.first([(0, 3)], 10.0) is None, "the coordinator is new, and looks for it now"
    assert lateness.first([(0, 3)], 12.0) == (0, 3)


def test_a_portion_is_done_once() -> None:
    pool = PortionPool(100, 10)
    pool.take(0)
    assert pool.finish(0, 0)
    assert not pool.finish(0, 0)
    assert not pool.finish(0, 5), "it was never leased"
    assert not pool.finish(7, 0)
    assert pool.done_count == 1


def test_a_portion_that_went_back_and_is_done_all_the_same_is_not_leased_again() -> None:
    pool = PortionPool(30, 10)
    pool.limit = 3
    pool.take(0)
    pool.release(0)
    assert pool.finish(0, 0)
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
        if what == "take" and (taken := pool.take(slot)) is not None:
            held[slot].append((taken.data_epoch, taken.portion))
        elif what == "finish" and held[slot]:
            key = held[slot].pop(0)
            finished += [key] if pool.finish(*key) else []
        elif what == "die":
            pool.release(slot)
            held[slot] = []
    for slot in held:
        pool.release(slot)
    finished += drain(pool)
    assert sorted(finished) == [(epoch, p) for epoch in range(2) for p in range(4)]
    assert pool.is_finished()


@given(st.integers(0, 7), st.integers(1, 8))
def test_a_restored_pool_goes_on_where_it_was(done: int, limit: int) -> None:
    before, after = PortionPool(40, 10), PortionPool(40, 10)
    before.limit = after.limit = limit
    for _ in range(min(done, limit)):
        taken = before.take(0)
        assert taken is not None
        before.finish(taken.data_epoch, taken.portion)
    saved = before.to_json()
    after.restore(saved["complete_epochs"], saved["portions"])
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
            pool.take(slot)
        elif what == "finish":
            pool.finish(data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2)))
        elif what == "die":
            pool.release(slot)
        else:
            write_down(notes, pool)
    write_down(notes, pool)
    next_pool = PortionPool(30, 10)
    next_pool.limit = 9
    next_pool.go_on(pool.next, notes)
    assert next_pool.done_count == pool.done_count
    assert next_pool.to_json() == pool.to_json()
    for slot in range(3):
        assert next_pool.release(slot) == pool.release(slot)
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


# ---------------------------------------------------------------- a worker's side


def lease(portion: int = 0, samples: int = 33) -> Lease:
    return Lease(1, portion, 0, 100, 100 + samples)


def test_no_batch_is_larger_than_asked_and_none_is_tiny() -> None:
    portions = Portions(32, 2.0)
    portions.take(lease(samples=33))
    assert portions.current is not None
    ranges = [portions.current.batch_range(n) for n in range(portions.current.batches)]
    assert ranges == [(100, 116), (116, 133)]


def test_a_portion_is_done_when_the_push_with_its_last_batch_is_settled() -> None:
    portions = Portions(32, 2.0)
    portions.take(lease(samples=64))
    for number in range(2):
        batch = portions.next_batches(1)
        assert batch is not None
        batch[0].steps += 1
        if number == 0:
            portions.pushed(0, 1)
    batch[0].computed_at = 2
    portions.finish(batch[0])
    portions.pushed(1, 2)
    assert portions.settled(0) == []
    assert portions.settled(1) == [batch[0]]


def test_what_a_late_push_held_is_not_trained() -> None:
    """The portion is done all the same: nobody computes it again."""
    portions = Portions(batch_size=2, ahead_s=0.0)
    portions.take(Lease(1, 0, 0, 0, 6))
    for number, loss in enumerate((1.0, 2.0, 4.0)):
        portion, _, _ = portions.next_batches(1)
        portions.count(portion, 2, loss, {"seen": loss})
        if number == 2:
            portions.finish(portion)
        portions.pushed(number, number + 1)
    assert portions.settled(0) == []
    portions.late(1)
    assert portions.settled(1) == []
    (done,) = portions.settled(2)
    assert (done.steps, done.samples, done.loss_sum) == (2, 4, 10.0)
    assert done.metric_sums == {"seen": [10.0, 4]}
    portions.late(2)
    assert done.samples == 4, "it is settled"


def test_it_is_known_how_much_is_at_hand() -> None:
    portions = Portions(32, ahead_s=2.0)
    assert portions.batches_left() == 0
    portions.take(lease(0, samples=64))
    portions.take(lease(1, samples=96))
    assert portions.batches_left() == 5
    portions.next_batches(1)
    assert portions.batches_left() == 4
    assert not portions.wants_more_ahead(batch_s=0.0)
    assert portions.wants_more_ahead(batch_s=0.4)
    assert not portions.wants_more_ahead(batch_s=0.5)


def test_a_portion_whose_last_batches_were_refused_is_done_with_the_push_before() -> None:
    portions = Portions(32, 2.0)
    portions.take(lease(0, samples=32))
    portions.take(lease(1, samples=32))
    finished = []
    for _ in range(2):
        batch = portions.next_batches(1)
        assert batch is not None
        portions.finish(batch[0])
        portions.pushed(4, 0)
        finished.append(batch[0])
    assert portions.settled(4) == finished


# ---------------------------------------------------------------- when it is enough


@pytest.mark.parametrize(
    ("text", "metrics", "reached"),
    [
        ("accuracy >= 0.85", {"accuracy": 0.85}, True),
        ("accuracy >= 0.85", {"accuracy": 0.84}, False),
        ("loss<1e-3", {"loss": 0.0001}, True),
        ("test/loss < -0.5", {"test/loss": -1.0}, True),
        ("accuracy > 0.5", {"loss": 1.0}, False),
    ],
)
def test_a_target_is_a_metric_and_a_bound(
    text: str, metrics: dict[str, float], reached: bool
) -> None:
    assert Target.parse(text).is_reached(metrics) is reached


@pytest.mark.parametrize("text", ["", "accuracy", "accuracy = 1", ">= 1", "a >= b", "a >= 1 2"])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a metric"):
        Target.parse(text)


@pytest.mark.parametrize("batch_size", [1, 3, 7])
@pytest.mark.parametrize(("samples", "portion_samples"), [(1, 5), (100, 100), (100, 7), (23, 3)])
def test_the_steps_and_samples_of_the_first_portions_add_up(samples, portion_samples, batch_size):
    pool = PortionPool(samples, portion_samples)
    lengths = [hi - lo for lo, hi in map(pool.bounds, range(pool.per_epoch))]
    for portion in range(pool.per_epoch + 1):
        assert pool.samples_before(portion) == sum(lengths[:portion])
        steps = sum(-(-length // batch_size) for length in lengths[:portion])
        assert pool.steps_before(portion, batch_size) == steps
