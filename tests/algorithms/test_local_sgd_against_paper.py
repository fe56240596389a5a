"""Local SGD with several replicas, against the loop of the paper (Stich 2019, Alg. 1)."""

import numpy as np
import pytest
from by_hand import Player, Shards

from dlctl.algorithms.methods.local_sgd import LOCAL_SGD, Options
from dlctl.algorithms.needs import NextBatch, Step

REPLICAS, SIZE, BATCHES = 3, 5, 12
RATE = 0.2
OUTER_RATE = 0.1
"""Of the shards in `by_hand`, plain SGD."""
TARGETS = np.random.default_rng(7).standard_normal((REPLICAS, BATCHES, SIZE)).astype(np.float32)


def gradient(parameters, batch):
    """Towards another target with every batch of every replica."""
    return Step(parameters - TARGETS[batch], 1, 1.0)


def replicas(steps: int, *, overlap: bool = False) -> tuple[Shards, list[Player]]:
    shards = Shards(LOCAL_SGD, np.ones(SIZE, np.float32), 2)
    for side in shards.sides:
        side.members(frozenset(range(REPLICAS)))
    everybody = [Player(LOCAL_SGD, shards, gradient, slot, own_lr=RATE) for slot in range(REPLICAS)]
    for player in everybody:
        player.side.options = Options(local_steps=steps, overlap=overlap)
    return shards, everybody


def give(player: Player, first: int, end: int) -> None:
    player.todo += [(NextBatch(0, 0, False), (player.slot, n)) for n in range(first, end)]


def advance(everybody: list[Player]) -> None:
    """Until each of them needs data or waits for another."""
    for _ in range(BATCHES):
        for player in everybody:
            player.advance()


def round_of(theta, batches) -> np.ndarray:
    """The parameters after a round; batches: for each replica its numbers."""
    thetas = [theta.copy() for _ in batches]
    for slot, numbers in enumerate(batches):
        for number in numbers:
            thetas[slot] -= RATE * (thetas[slot] - TARGETS[slot, number])
    weights = [len(numbers) for numbers in batches]
    return theta - OUTER_RATE * (theta - np.average(thetas, axis=0, weights=weights))


@pytest.mark.oracle("local-sgd", "the loop of Stich 2019 in float64")
def test_a_round_takes_the_mean_of_what_the_replicas_have_come_to(agree):
    shards, everybody = replicas(steps=4)
    for player in everybody:
        give(player, 0, BATCHES)
    advance(everybody)
    theta = np.ones(SIZE)
    for first in (0, 4, 8):
        theta = round_of(theta, [range(first, first + 4)] * REPLICAS)
    agree(shards.whole(), theta, rtol=1e-5)


def test_who_has_no_more_data_counts_by_what_it_has_done():
    """One batch of four, none at all, and all four: nobody waits for the first two."""
    shards, everybody = replicas(steps=4)
    for player, batches in zip(everybody, (1, 0, 4), strict=True):
        give(player, 0, batches)
    advance(everybody)
    assert shards.shards[0].version == 0
    everybody[0].tell_none()
    everybody[1].tell_none()  # It has not begun yet; now it takes part ...
    everybody[1].tell_none()  # ... without a gradient.
    advance(everybody)
    theta = round_of(np.ones(SIZE), [range(1), range(0), range(4)])
    np.testing.assert_allclose(shards.whole(), theta, rtol=1e-5)


def test_the_number_of_steps_changes_in_the_middle_of_a_round():
    _, everybody = replicas(steps=4)
    for player in everybody:
        give(player, 0, 3)
    advance(everybody)
    assert [player.samples_pushed for player in everybody] == [0, 0, 0]
    for player in everybody:
        player.side.options.local_steps = 2
        give(player, 3, 4)
    advance(everybody)
    assert [player.samples_pushed for player in everybody] == [4, 4, 4]


# ---------------------------------------------------------------- while the mean is under way


@pytest.mark.oracle("local-sgd", "its loop, with overlap")
def test_steps_that_are_made_before_the_mean_has_come_are_put_on_top_of_it(agree):
    """The first two have made three steps of the second round when the third one ends the first."""
    shards, everybody = replicas(steps=4, overlap=True)
    for player, batches in zip(everybody, (7, 7, 4), strict=True):
        give(player, 0, batches)
    advance(everybody)
    theta = round_of(np.ones(SIZE), [range(4)] * REPLICAS)
    agree(shards.whole(), theta, rtol=1e-5)
    for player in everybody[:2]:
        alone = np.ones(SIZE)
        for number in range(4):
            alone -= RATE * (alone - TARGETS[player.slot, number])
        at_push = alone.copy()
        for number in range(4, 7):
            alone -= RATE * (alone - TARGETS[player.slot, number])
        agree(player.parameters, theta + (alone - at_push), rtol=1e-5)
    agree(everybody[2].parameters, theta, rtol=1e-5)


def test_what_a_push_has_left_behind_is_no_step_of_the_next_round():
    """A sparse push leaves most of the residual; the replica goes on from the mean without it."""
    _, (player, *others) = replicas(steps=1, overlap=True)
    side = player.side
    for other in (player, *others):
        give(other, 0, 1)
    advance([player])
    side.residual += 5
    advance(others)
    before = player.parameters.copy()
    advance([player])
    assert not np.array_equal(before, player.parameters)
    np.testing.assert_allclose(player.parameters, player.shards.whole(), rtol=1e-5)


def test_a_residual_that_is_restored_late_is_no_step_of_the_next_round():
    """It had to come from another host: a push is out, and two steps of the next round are made."""
    _, (player, *others) = replicas(steps=3, overlap=True)
    give(player, 0, 3)
    for other in others:
        give(other, 0, 3)
    advance([player])
    side, at_push = player.side, player.parameters.copy()
    give(player, 3, 5)
    advance([player])
    steps = at_push - player.parameters
    assert steps.any()
    side.restore({"residual": np.full(SIZE, 5, np.float32)})
    advance(others)
    advance([player])
    np.testing.assert_allclose(player.parameters, player.shards.whole() - steps, rtol=1e-5)
    np.testing.assert_allclose(side.residual, 5, rtol=1e-5)


def test_nobody_gets_a_whole_round_ahead():
    _, everybody = replicas(steps=2, overlap=True)
    give(everybody[0], 0, BATCHES)
    advance(everybody)
    assert len(everybody[0].todo) == BATCHES - 4
    assert everybody[0].samples_pushed == 2


# ---------------------------------------------------------------- steps that explode

HUGE = np.float32(1e30)
"""Finite, and no shard could take it."""


def explodes(parameters, batch):
    """The step of the batch "bad" leads nowhere, and all that are computed there, too."""
    if batch == "bad" or np.abs(parameters).max() > 1e10:
        return Step(np.full(SIZE, HUGE), 1, 1.0)
    return gradient(parameters, batch)


def give_bad(player: Player) -> None:
    player.gradient = explodes
    player.todo.append((NextBatch(0, 0, False), "bad"))


@pytest.mark.parametrize("overlap", [False, True])
def test_who_explodes_in_a_round_pushes_nothing_of_it_and_goes_on_from_the_mean(overlap):
    shards, everybody = replicas(steps=2, overlap=overlap)
    player, *others = everybody
    give(player, 0, 1)
    give_bad(player)
    for other in others:
        give(other, 0, 2)
    advance(everybody)
    theta = round_of(np.ones(SIZE), [range(0), range(2), range(2)])
    np.testing.assert_allclose(shards.whole(), theta, rtol=1e-5)
    np.testing.assert_allclose(player.parameters, theta, rtol=1e-5)
    assert player.samples_pushed == 0
    for other in everybody:
        give(other, 2, 4)
    advance(everybody)
    assert [p.samples_pushed for p in everybody] == [2, 4, 4]
    np.testing.assert_allclose(shards.whole(), round_of(theta, [range(2, 4)] * REPLICAS), rtol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_who_explodes_keeps_what_earlier_pushes_have_left_behind(overlap):
    """Those portions are noted: nobody trains them again."""
    _, everybody = replicas(steps=2, overlap=overlap)
    player = everybody[0]
    left = np.full(SIZE, 0.25, np.float32)
    player.side.restore({"residual": left})
    give(player, 0, 1)
    give_bad(player)
    for other in everybody[1:]:
        give(other, 0, 2)
    advance(everybody)
    assert player.samples_pushed == 0
    np.testing.assert_array_equal(player.side.residual, left)


def test_who_explodes_while_the_mean_is_under_way_sits_out_the_round():
    shards, everybody = replicas(steps=4, overlap=True)
    player, *others = everybody
    give(player, 0, 5)
    give_bad(player)
    give(player, 6, BATCHES)
    advance([player])
    assert np.abs(player.parameters).max() > 1e10
    assert len(player.todo) == BATCHES - 8, "no round is begun from there"
    theta = np.ones(SIZE)
    for first, slots in ((0, everybody), (4, others)):
        for other in others:
            give(other, first, first + 4)
        advance(everybody)
        mine = range(first, first + 4) if player in slots else range(0)
        theta = round_of(theta, [mine, *[range(first, first + 4)] * 2])
        np.testing.assert_allclose(shards.whole(), theta, rtol=1e-5)
    for other in others:
        give(other, 8, BATCHES)
    advance(everybody)
    assert [p.samples_pushed for p in everybody] == [8, 12, 12]
    theta = round_of(theta, [range(8, BATCHES)] * REPLICAS)
    np.testing.assert_allclose(shards.whole(), theta, rtol=1e-5)


def test_who_has_exploded_and_waits_for_the_mean_pushes_none_of_it():
    """It is a whole round ahead: the last of its steps is the bad one."""
    shards, everybody = replicas(steps=2, overlap=True)
    player, *others = everybody
    give(player, 0, 3)
    give_bad(player)
    advance([player])
    assert not player.todo
    for other in others:
        give(other, 0, 4)
    advance(everybody)
    assert [p.samples_pushed for p in everybody] == [2, 4, 4]
    assert shards.shards[0].version == 2
    assert np.abs(shards.whole()).max() < 10
    np.testing.assert_allclose(player.parameters, shards.whole(), rtol=1e-5)


def test_a_residual_that_is_restored_out_of_range_costs_one_round():
    _, everybody = replicas(steps=3)
    player, *others = everybody
    give(player, 0, 1)
    advance([player])
    player.side.restore({"residual": np.full(SIZE, 1e19, np.float32)})
    give(player, 1, 3)
    for other in others:
        give(other, 0, 3)
    advance(everybody)
    assert [each.samples_pushed for each in everybody] == [0, 3, 3]
    for each in everybody:
        give(each, 3, 6)
    advance(everybody)
    assert [each.samples_pushed for each in everybody] == [3, 6, 6]


def test_what_has_become_infinite_without_a_gradient_is_not_pushed():
    """A task may write to its model, although it must not."""
    _, everybody = replicas(steps=2)
    player = everybody[0]
    give(player, 0, 1)
    advance([player])
    player.parameters[2] = np.nan
    player.gradient = lambda parameters, batch: Step(np.ones(SIZE, np.float32), 1, 1.0)
    give(player, 1, 2)
    advance([player])
    assert player.samples_pushed == 0
    assert np.isfinite(player.side.residual).all()
