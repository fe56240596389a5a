"""Synchronous SGD with backup workers, against the step of the paper (Chen et al. 2016, Alg. 4)."""

from dataclasses import replace

import numpy as np
import pytest
from by_hand import Player, Shards

from dlctl.algorithms.methods.sync import SYNC, FirstOnes, Options, Replica
from dlctl.algorithms.needs import NextBatch, Step
from dlctl.job.config import Choice, Job, JobFile, Workers
from dlctl.wire.messages import APPLIED, HELD, LATE

N, SIZE, RATE = 3, 5, 0.1
"""RATE: of the shards in `by_hand`, plain SGD."""
TARGETS = np.random.default_rng(3).standard_normal((N, 9, SIZE)).astype(np.float32)
OPTIONS = Options(backup_workers=1)


def gradient_of(w, batch):
    return Step(w - TARGETS[batch], 1, 1.0)


def replicas():
    shards = Shards(SYNC, np.ones(SIZE, np.float32), 2, OPTIONS)
    shards.members(frozenset(range(N)))
    players = [Player(SYNC, shards, gradient_of, slot, options=OPTIONS) for slot in range(N)]
    for player in players:
        player.tell_none()  # It has not begun; now it takes part, and reads.
    return shards, players


def compute(player, number):
    player.todo.append((NextBatch(0, number, True), (player.slot, number)))
    player.advance()


def after(w, *batches):
    """A step by the mean of their gradients at w."""
    return w - RATE * np.mean([w - TARGETS[batch] for batch in batches], axis=0)


@pytest.mark.oracle("sync", "the step of Chen 2016, by the first N gradients")
def test_the_first_ones_make_the_step_and_a_late_gradient_is_in_none(agree):
    shards, (first, second, slow) = replicas()
    w = np.ones(SIZE)
    compute(first, 0)
    np.testing.assert_array_equal(shards.whole(), w)
    compute(second, 0)
    w = after(w, (0, 0), (1, 0))
    agree(shards.whole(), w, rtol=1e-6)
    first.advance()
    compute(slow, 0)
    agree(shards.whole(), w, rtol=1e-6)
    assert shards.outcomes[0, slow.slot, 1, 0] == [LATE]
    agree(slow.parameters, w, rtol=1e-6)

    compute(slow, 1)
    compute(first, 1)
    w = after(w, (2, 1), (0, 1))
    agree(shards.whole(), w, rtol=1e-6)
    compute(second, 1)
    for player in (first, second, slow):
        player.advance()
    assert [player.samples for player in (first, second, slow)] == [2, 2, 2]
    assert [player.samples_done for player in (first, second, slow)] == [2, 1, 1]
    figures = {"worker-0 counted": 1.0, "worker-1 counted": 0.5, "worker-2 counted": 0.5}
    assert shards.lead.figures() == figures
    kinds = {kind for outcomes in shards.outcomes.values() for kind in outcomes}
    assert kinds == {HELD, APPLIED, LATE}


def test_who_has_no_data_is_not_waited_for_and_takes_nobody_s_place():
    shards, (first, second, third) = replicas()
    first.tell_none()
    second.tell_none()
    np.testing.assert_array_equal(shards.whole(), 1)
    assert shards.shards[0].version == 0
    compute(third, 0)
    np.testing.assert_allclose(shards.whole(), after(np.ones(SIZE), (2, 0)), rtol=1e-6)
    assert third.samples_done == 1


def test_steps_without_any_gradient_are_passed_over():
    shards, players = replicas()
    for player in players:
        player.tell_none()
    assert [shard.version for shard in shards.shards] == [1, 1]
    assert shards.lead.figures() == {}


@pytest.mark.parametrize(
    ("came", "members", "chosen"),
    [
        ({0: 4}, {0, 1, 2}, None),
        ({0: 4, 2: 4}, {0, 1, 2}, {0, 2}),
        ({0: 4, 1: 4, 2: 4}, {0, 1, 2}, {0, 2}),  # Worker 1 has counted more often.
        ({0: 4, 2: 0}, {0, 1, 2}, None),
        ({0: 4, 1: 4, 2: 0}, {0, 1, 2}, {0, 1, 2}),
        ({0: 4}, {0, 1}, {0}),
        ({0: 4}, {0}, {0}),
        ({1: 0}, {0, 1}, None),
        ({0: 0, 1: 0}, {0, 1}, {0, 1}),
    ],
)
def test_who_counts(came, members, chosen):
    lead = FirstOnes(OPTIONS)
    lead.resume({"steps": 5, "counted": [[0, 1], [1, 3], [2, 2]]})
    assert lead.quorum(7, came, frozenset(members), 0.0) == chosen
    again = FirstOnes(OPTIONS)
    again.resume(lead.state())
    assert again.figures() == lead.figures()


def test_without_backups_nobody_decides_and_more_than_there_are_is_refused():
    assert not SYNC.shard.of(Options()).asks_lead
    assert SYNC.shard.of(OPTIONS).asks_lead
    job = JobFile(
        job=Job(name="a", task="none"), workers=Workers(count=2),
        algorithm=Choice(name="sync", options={"backup_workers": 1}),
    )  # fmt: skip
    assert SYNC.check(job) == []
    two = replace(job, algorithm=Choice(name="sync", options={"backup_workers": 2}))
    ((where, what, _),) = SYNC.check(two)
    assert (where, "2" in what.split()) == (("algorithm", "backup_workers"), True)
    assert SYNC.replica is Replica
