"""target-batch: steps of a fixed number of samples, whoever computes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from by_hand import Player, Shards

from dlctl.algorithms.methods.target_batch import TARGET_BATCH, FullBatch, Options
from dlctl.algorithms.needs import NextBatch, Step
from dlctl.job.config import Choice, Gradients, Host, Job, JobFile, Stop, Workers
from dlctl.wire.messages import APPLIED, HELD, LATE

N, SIZE, RATE = 3, 5, 0.1
"""RATE: of the shards in `by_hand`, plain SGD."""
TARGETS = np.random.default_rng(3).standard_normal((N, 20, SIZE)).astype(np.float32)
SAMPLES = (1, 2, 5)
"""Of a batch of each replica."""


def gradient_of(w, batch):
    slot, _ = batch
    return Step(w - TARGETS[batch], SAMPLES[slot], 1.0)


def replicas(target, *, in_time=True):
    """in_time: the deadline is never over."""
    chosen = Options(target_samples=target)
    shards = Shards(TARGET_BATCH, np.ones(SIZE, np.float32), 2, chosen)
    shards.takes_time = in_time
    shards.members(frozenset(range(N)))
    players = [
        Player(
            TARGET_BATCH, shards, gradient_of, slot, options=chosen, batch_size=SAMPLES[slot],
            samples_of=lambda batch: SAMPLES[batch[0]],
        )
        for slot in range(N)
    ]  # fmt: skip
    for player in players:
        player.tell_none()  # It has not begun; now it takes part, and reads.
    return shards, players


def compute(player, *numbers):
    for number in numbers:
        player.todo.append((NextBatch(0, number, True), (player.slot, number)))
        player.advance()


def after(w, *batches):
    """A step by the mean gradient at w of all samples of these batches."""
    weights = [SAMPLES[slot] for slot, _ in batches]
    return w - RATE * np.average([w - TARGETS[batch] for batch in batches], axis=0, weights=weights)


@pytest.mark.oracle("target-batch", "large-batch SGD, by the samples of unequal replicas")
def test_all_samples_weigh_the_same_whoever_has_computed_them(agree):
    shards, (first, second, third) = replicas(target=12)
    w = np.ones(SIZE)
    version = shards.shards[0].version
    compute(third, 0)  # 5
    compute(first, 0, 1, 2)  # 8
    np.testing.assert_array_equal(shards.whole(), w)
    compute(second, 0, 1)  # 12: enough
    np.testing.assert_array_equal(shards.whole(), w)
    compute(first, 3)  # What it was computing meanwhile.
    compute(third, 1)
    w = after(w, (2, 0), (2, 1), (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1))
    agree(shards.whole(), w, rtol=1e-6)
    assert [shard.version for shard in shards.shards] == [version + 1] * 2
    for player in (first, second, third):
        player.advance()
        agree(player.parameters, w, rtol=1e-6)


def test_the_step_is_not_made_before_there_are_enough_samples():
    shards, (first, second, third) = replicas(target=1000)
    for player in (first, second, third):
        compute(player, *range(8))
    np.testing.assert_array_equal(shards.whole(), 1)
    assert all(player.samples_pushed == 0 for player in (first, second, third))


def test_who_has_no_more_data_pushes_what_it_has_and_waits_for_the_others():
    shards, (first, second, third) = replicas(target=13)
    compute(first, 0)
    first.tell_none()
    assert first.samples_pushed == 1
    np.testing.assert_array_equal(shards.whole(), 1)
    compute(second, 0)
    compute(third, 0, 1)  # 13
    compute(second, 1)
    np.testing.assert_allclose(
        shards.whole(), after(np.ones(SIZE), (0, 0), (1, 0), (1, 1), (2, 0), (2, 1)), rtol=1e-6
    )


def test_a_late_push_is_in_no_step_and_its_replica_goes_on():
    shards, (first, second, slow) = replicas(target=3, in_time=False)
    compute(first, 0)
    compute(second, 0)  # 3
    compute(first, 1)  # It sees them; the deadline is over at once.
    first.advance()
    w = shards.whole()
    assert np.abs(w - 1).max() > 1e-3
    compute(slow, 0)
    slow.advance()
    np.testing.assert_array_equal(shards.whole(), w)
    kinds = {kind for kinds in shards.outcomes.values() for kind in kinds}
    assert kinds == {HELD, APPLIED, LATE}
    assert slow.samples_done == 0
    np.testing.assert_array_equal(slow.parameters, w)


def test_who_counts_until_when():
    lead = FullBatch(Options(deadline_s=30.0))
    everybody = frozenset({0, 1, 2})
    assert lead.quorum(4, {0: 0}, everybody, 500.0) is None, "its data has ended: no deadline"
    assert lead.quorum(4, {0: 0, 1: 8}, everybody, 510.0) == 540.0
    assert lead.quorum(4, {0: 0, 1: 8}, everybody, 539.0) == 540.0
    assert lead.quorum(4, {0: 0, 1: 8}, everybody, 540.0) == {0, 1}
    assert lead.quorum(5, {1: 8}, everybody, 1.0) == 31.0, "a deadline of its own"
    assert lead.quorum(5, {1: 8, 0: 8, 2: 8}, everybody, 2.0) == everybody
    assert lead.quorum(6, {1: 8, 0: 0}, frozenset({0, 1}), 1.0) == {0, 1}
    again = FullBatch(Options())
    again.resume(lead.state())
    assert again.figures() == lead.figures()


def job_of(options=None, **more):
    chosen = {"target_samples": 64, "deadline_s": 30.0, **(options or {})}
    return JobFile(
        job=Job(name="a", task="none", stop=more.pop("stop", Stop(epochs=1))),
        workers=Workers(count=2, batch_size=32),
        algorithm=Choice(name="target-batch", options=chosen), **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("job", "number"),
    [
        (job_of({"target_samples": 31}), "32"),
        (job_of(gradient=Gradients(accumulate=4)), "128"),
        (job_of(hosts=(Host(), Host(ssh="b", batch_size=100))), "100"),
        (job_of(stop=Stop(samples=63)), "63"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(job, number):
    ((where, what, instead),) = TARGET_BATCH.check(job)
    assert where == ("algorithm", "target_samples")
    assert number in f"{what} {instead}".split()


def test_a_run_that_is_too_short_for_one_step_is_refused():
    assert TARGET_BATCH.check(job_of()) == []
    assert TARGET_BATCH.check_samples(job_of(), 64) == []
    assert TARGET_BATCH.check_samples(job_of(), 63)[0][0] == ("algorithm", "target_samples")
    found = replace(job_of(), workers=Workers(count=2, batch_size="auto"))
    assert TARGET_BATCH.check(found) == []
