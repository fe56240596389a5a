"""A worker's side of its leases: batches of portions, and when a portion is done."""

from __future__ import annotations

from dlctl.roles.worker.leases import Counted, Portions
from dlctl.wire.messages import Lease


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
        portions.count(Counted(portion, 2, loss, {"seen": loss}, 1))
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
