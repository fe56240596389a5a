"""EASGD whose servers compute the pull, against a loop in numpy, and what it conserves."""

import numpy as np
import pytest
from by_hand import Player, Shards

from dlctl.algorithms.methods.easgd import BETA, Options
from dlctl.algorithms.methods.easgd_atomic import EASGD_ATOMIC
from dlctl.algorithms.needs import NextBatch, Step
from dlctl.algorithms.rounds import DISCARDED_MAX

P, SIZE, ETA, TAU = 3, 6, 0.2, 4
TARGETS = np.random.default_rng(5).standard_normal((P, 40, SIZE)).astype(np.float32)


def gradient_of(x, batch):
    """Towards another target with every batch of every replica."""
    return Step(x - TARGETS[batch], 1, 1.0)


def replicas(gradient=gradient_of, **options):
    chosen = Options(**{"exchange_every_steps": TAU, **options})
    shards = Shards(EASGD_ATOMIC, np.ones(SIZE, np.float32), 2, chosen)
    shards.members(frozenset(range(P)))
    players = [
        Player(EASGD_ATOMIC, shards, gradient, slot, own_lr=ETA, options=chosen)
        for slot in range(P)
    ]
    return shards, players


def step(player, number, is_last=False):
    player.todo.append((NextBatch(0, 0, is_last), (player.slot, number)))
    player.advance()


@pytest.mark.oracle("easgd-atomic", "the same loop, one centre")
@pytest.mark.parametrize("alpha", [0.25, "auto"])
def test_replicas_in_any_order_pull_and_are_pulled_at_one_moment(alpha, agree):
    shards, players = replicas(alpha=alpha)
    centre, x, clocks = np.ones(SIZE), np.ones((P, SIZE)), [0] * P
    part = BETA / P if alpha == "auto" else alpha
    for slot in np.random.default_rng(1).integers(P, size=80):
        step(players[slot], clocks[slot])
        position, e = x[slot].copy(), np.zeros(SIZE)
        if clocks[slot] == 0:
            position = centre.copy()
        elif clocks[slot] % TAU == 0:
            e = part * (position - centre)
        x[slot] = position - ETA * (position - TARGETS[slot, clocks[slot]]) - e
        centre += e
        clocks[slot] += 1
        agree(shards.whole(), centre, rtol=1e-5, atol=1e-6)
        agree(players[slot].parameters, x[slot], rtol=1e-5, atol=1e-6)


def test_what_the_centre_gets_is_what_the_replica_gives():
    """Also if others have moved the centre meanwhile."""
    shards, players = replicas(lambda x, batch: Step(x * 0, 1, 1.0), exchange_every_steps=1)
    for slot, player in enumerate(players):
        step(player, 0)
        player.parameters[:] = slot * 3 - 2
    everything = sum(p.parameters.astype(np.float64) for p in players) + shards.whole()
    for number in range(1, 30):
        step(players[number % P], number % 40)
        now = sum(p.parameters.astype(np.float64) for p in players) + shards.whole()
        np.testing.assert_allclose(now, everything, rtol=0, atol=1e-5)
    assert np.ptp([player.parameters for player in players], axis=0).max() < 2.0


def test_all_steps_are_pushed_where_data_ends():
    _, (player, *_) = replicas()
    for number in range(6):
        step(player, number, is_last=number == 5)
    assert (player.samples_pushed, player.samples_done) == (4, 4)
    player.tell_none()
    assert (player.samples_pushed, player.samples_done) == (6, 6)


def test_a_replica_that_is_not_finite_where_data_ends_does_not_hold_the_run_up():
    """It hears only once that there is no data."""
    shards, (player, *_) = replicas()
    for number in range(6):
        step(player, number, is_last=number == 5)
    player.parameters[:] = np.nan
    player.tell_none()
    assert not player.training.writing.has_unpushed_steps()
    assert player.samples_done == 6
    assert np.isfinite(shards.whole()).all()


def test_who_joins_begins_at_the_centre_and_its_predecessor_s_pull_is_forgotten():
    shards, (player, *_) = replicas(exchange_every_steps=1)
    for number in range(5):
        step(player, number)
    for side in shards.sides:
        side.joined(0)
    again = Player(EASGD_ATOMIC, shards, gradient_of, 0, 2, own_lr=0.0)
    again.side.options = Options(exchange_every_steps=1)
    step(again, 5)
    np.testing.assert_array_equal(again.parameters, shards.whole())


def test_who_diverges_begins_at_the_centre_again():
    shards, (player, *_) = replicas()
    step(player, 0)
    player.parameters[:] = np.inf
    player.gradient = lambda x, batch: Step(x * np.nan, 1, 1.0)
    for number in range(DISCARDED_MAX + 1):
        step(player, number)
    player.gradient = gradient_of
    for number in range(6):
        step(player, number)
    assert np.isfinite(player.parameters).all()
    assert np.isfinite(shards.whole()).all()


def test_a_worker_beyond_the_job_s_is_refused_and_changes_nothing():
    shards, _ = replicas()
    other = Player(EASGD_ATOMIC, shards, gradient_of, 9, own_lr=ETA)
    other.side.options = Options(exchange_every_steps=1)
    for number in range(2):
        other.todo.append((NextBatch(0, 0, False), (0, number)))
        other.advance()
    assert shards.outcomes[0, 9, 1, 1] == ["refused"]
    np.testing.assert_array_equal(shards.whole(), 1)
