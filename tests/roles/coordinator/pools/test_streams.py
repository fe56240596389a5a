"""The portions of a stream: each sample once, whoever dies, and wherever shards end."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from dlctl.roles.coordinator.pools.data_pool import Range
from dlctl.roles.coordinator.pools.streams import StreamPool

BATCH, PORTION = 4, 8
Key = tuple[int, int, int]
"""Data epoch, shard, number of a sample."""


class Run:
    """A pool, its workers and what is on record of it."""

    def __init__(self, lengths: list[int], samples: float, steps: float = float("inf")) -> None:
        self.lengths = lengths
        self.most = (samples, steps)
        self.pool = self.new()
        self.held: dict[int, list[Range]] = {}
        self.seen: Counter[Key] = Counter()
        self.record: dict[tuple[int, int], Any] = {}

    def new(self) -> StreamPool:
        return StreamPool(len(self.lengths), PORTION, BATCH, *self.most)

    def take(self, slot: int) -> Range | None:
        taken = self.pool.take(slot, 0.0)
        if taken is not None:
            self.held.setdefault(slot, []).append(taken)
        return taken

    def finish(self, slot: int, *, tells_before: bool = False) -> None:
        """A worker does its first portion."""
        portion = self.held[slot].pop(0)
        length = self.lengths[portion.shard]
        stop = min(portion.stop, max(length, portion.start))
        end = stop if stop < portion.stop else -1
        if tells_before and end >= 0:
            self.pool.ended(portion.data_epoch, portion.shard, end)
        if not self.pool.may_finish(slot, portion.data_epoch, portion.portion):
            assert stop == portion.start, "only what is behind an end is forgotten"
            return
        self.pool.finish(portion.data_epoch, portion.portion, 0.0, end)
        self.seen.update((portion.data_epoch, portion.shard, n) for n in range(portion.start, stop))

    def die(self, slot: int) -> None:
        self.held.pop(slot, None)
        self.pool.give_back(slot)

    def keep(self) -> None:
        for epoch, portion, value in self.pool.take_changes():
            if value is None:
                self.record.pop((epoch, portion), None)
            else:
                self.record[epoch, portion] = json.loads(json.dumps(value))

    def another_coordinator(self) -> None:
        self.keep()
        next_ = self.pool.next
        self.pool = self.new()
        self.pool.resume(next_, self.record)

    def resume(self) -> None:
        """From a checkpoint: nobody has anything."""
        saved = json.loads(json.dumps(self.pool.to_json()))
        self.pool, self.held, self.record = self.new(), {}, {}
        self.pool.restore(saved)

    def go(self, slots: int) -> None:
        """To the end, one after the other."""
        while not self.pool.is_finished():
            for slot in range(slots):
                if self.held.get(slot) or self.take(slot):
                    self.finish(slot)
                self.keep()


def everything(lengths: list[int], epochs: int) -> Counter[Key]:
    return Counter(
        (epoch, shard, n)
        for epoch in range(epochs)
        for shard, length in enumerate(lengths)
        for n in range(length)
    )


def test_a_worker_goes_on_with_its_shard_and_then_helps_with_another():
    run = Run([40, 16, 16], 72)
    order: dict[int, list[int]] = {0: [], 1: []}
    while not run.pool.is_finished():
        for slot in order:
            if (taken := run.take(slot)) is not None:
                order[slot].append(taken.shard)
                run.finish(slot)
    for shards in order.values():
        assert len(list(dict.fromkeys(shards))) == sum(
            a != b for a, b in zip([None, *shards], shards, strict=False)
        ), "nobody comes back to a shard"
    assert order[0][:2] == [0, 0]
    assert order[1][0] == 1
    assert run.seen == everything([40, 16, 16], 1)


def test_what_was_leased_behind_an_end_is_empty_and_what_comes_back_from_there_is_dropped():
    run = Run([20], 1000)
    for slot in (0, 1, 2, 3):
        for _ in range(2):
            run.take(slot)
    run.die(3)
    for slot in (2, 1, 1, 0, 0, 2):
        run.finish(slot)
    assert run.seen == everything([20], 1)
    assert run.pool.epochs_done() == 1.0
    assert (run.pool.samples_done, run.pool.epochs.steps_done) == (20, 5)
    assert run.take(0) == Range(1, 0, 0, 8, 0), "the next data epoch"


def test_a_word_about_an_end_ends_the_leases_before_its_portion_is_done():
    run = Run([20, 80], 1000)
    for _ in range(3):
        run.take(0)
    run.pool.ended(0, 0, 20)
    assert [run.take(0).shard, run.take(1).shard] == [1, 1]


@pytest.mark.parametrize(("samples", "steps"), [(30, float("inf")), (float("inf"), 8)])
def test_a_run_takes_whole_portions_up_to_its_limit_and_makes_up_for_short_ones(samples, steps):
    run = Run([12, 12, 12], samples, steps)
    run.go(2)
    assert run.pool.samples_done == 32
    assert run.pool.take(0, 0.0) is None
    assert run.pool.progress() == 1.0


def test_a_stream_is_begun_again_if_it_ends_before_the_run():
    run = Run([20, 5], 75)
    run.go(2)
    assert run.seen == everything([20, 5], 3)
    assert (run.pool.passes(), run.pool.samples_in_all(), run.pool.epochs_done()) == (3, 25, 3.0)


@pytest.mark.parametrize(
    ("before", "text"), [(0, "has no samples"), (20, "has ended after 20 samples, before job.stop")]
)
def test_a_stream_that_gives_nothing_is_an_error(before, text):
    run = Run([before, 0], 100)
    while not run.pool.failed:
        assert run.take(0)
        run.finish(0)
        if run.pool.epochs_done():
            run.lengths = [0, 0]
    assert text in run.pool.failed
    assert run.pool.take(0, 0.0) is None


def test_other_portions_than_at_the_checkpoint_begin_behind_what_is_done():
    run = Run([50, 50], 100)
    for _ in range(3):
        run.take(0)
        run.finish(0)
    pool = StreamPool(2, 12, 4, 100)
    pool.restore(run.pool.to_json())
    assert (pool.samples_done, pool.epochs.steps_done) == (24, 6)
    assert [pool.take(0, 0.0), pool.take(1, 0.0)] == [Range(0, 0, 24, 36, 0), Range(0, 1, 0, 12, 1)]


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_is_done_once_whatever_happens(seed):
    """Workers that die, coordinators that follow one another, checkpoints that are gone on from."""
    rng = random.Random(seed)
    lengths = [rng.choice([0, 3, 8, 16, 21, 40]) for _ in range(rng.randint(1, 4))]
    lengths[0] = lengths[0] or 13
    epochs = rng.randint(1, 3)
    run = Run(lengths, epochs * sum(lengths))
    for _ in range(5000):
        if run.pool.is_finished():
            break
        slot = rng.randrange(3)
        match rng.choices(["take", "finish", "die", "coordinator", "resume"], [9, 9, 1, 1, 0.3])[0]:
            case "take":
                run.take(slot)
            case "finish" if run.held.get(slot):
                run.finish(slot, tells_before=rng.random() < 0.5)
            case "die":
                run.die(slot)
            case "coordinator":
                run.another_coordinator()
            case "resume":
                run.resume()
    assert run.seen == everything(lengths, epochs)
    run.keep()
    kept = {(p.data_epoch, p.portion) for portions in run.held.values() for p in portions}
    assert {key for key in run.record if key[1] >= 0} <= kept, "what is complete is not kept"


def test_portions_of_older_passes_in_a_checkpoint_are_on_record_for_the_next_coordinator() -> None:
    pool = StreamPool(1, PORTION, BATCH)
    pool.restore(
        {"stream": [[], [[0, [[0, 1, 12, []]]], [1, [[0, 0, -1, []]]]]], "portion_samples": PORTION}
    )
    record = {(epoch, n): value for epoch, n, value in pool.take_changes() if value is not None}
    following = StreamPool(1, PORTION, BATCH)
    following.resume(pool.next, record)
    assert list(following.holders.returned) == list(pool.holders.returned) != []
