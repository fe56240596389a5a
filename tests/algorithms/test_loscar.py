"""LOSCAR-SGD with several replicas, against its loop in float64."""

import numpy as np
import pytest
from by_hand import Player, Shards

from dlctl.algorithms.methods.loscar import LOSCAR, Options, mask
from dlctl.algorithms.needs import NextBatch, Step

REPLICAS, SIZE, ROUNDS, STEPS = 3, 40, 12, 2
RATE, OUTER_RATE = 0.2, 0.1
"""Of a replica's steps; of the shards in `by_hand`, plain SGD."""
BATCHES = ROUNDS * STEPS
TARGETS = np.random.default_rng(7).standard_normal((REPLICAS, BATCHES, SIZE)).astype(np.float32)


def gradient(parameters, batch):
    return Step(parameters - TARGETS[batch], 1, 1.0)


def replicas(*, density: float, overlap: bool) -> tuple[Shards, list[Player]]:
    options = Options(local_steps=STEPS, density=density, overlap=overlap)
    shards = Shards(LOSCAR, np.ones(SIZE, np.float32), 2, options)
    shards.members(frozenset(range(REPLICAS)))
    everybody = [Player(LOSCAR, shards, gradient, slot, own_lr=RATE) for slot in range(REPLICAS)]
    for player in everybody:
        player.side.options = options
    return shards, everybody


def give(player: Player, first: int, end: int) -> None:
    player.todo += [
        (NextBatch(0, first, n == end - 1), (player.slot, n)) for n in range(first, end)
    ]


def advance(everybody: list[Player]) -> None:
    for _ in range(2 * BATCHES):
        for player in everybody:
            player.advance()


def walk(theta, slot, first, end):
    for number in range(first, end):
        theta -= RATE * (theta - TARGETS[slot, number])


@pytest.mark.oracle("loscar", "its loop in float64")
@pytest.mark.parametrize("density", [0.2, 1.0])
def test_rounds_average_what_the_mask_has_and_leave_the_rest(density, agree):
    shards, everybody = replicas(density=density, overlap=False)
    for player in everybody:
        give(player, 0, BATCHES)
    advance(everybody)
    x, thetas = np.ones(SIZE), [np.ones(SIZE) for _ in range(REPLICAS)]
    for number in range(ROUNDS):
        for slot, theta in enumerate(thetas):
            walk(theta, slot, number * STEPS, (number + 1) * STEPS)
        s = mask(number, SIZE, density)
        x[s] -= OUTER_RATE * np.mean([x[s] - theta[s] for theta in thetas], axis=0)
        for theta in thetas:
            theta[s] = x[s]
    agree(shards.whole(), x, rtol=1e-5, atol=1e-6)
    for player, theta in zip(everybody, thetas, strict=True):
        agree(player.parameters, theta, rtol=1e-5, atol=1e-6)


@pytest.mark.oracle("loscar", "its loop, with overlap")
def test_steps_made_meanwhile_stay_on_top_of_the_mean(agree):
    """The first two are a step into the second round when the third one ends the first."""
    shards, everybody = replicas(density=0.3, overlap=True)
    for player, batches in zip(everybody, (3, 3, 2), strict=True):
        give(player, 0, batches)
    advance(everybody)
    s, x = mask(0, SIZE, 0.3), np.ones(SIZE)
    thetas = [np.ones(SIZE) for _ in range(REPLICAS)]
    for slot, theta in enumerate(thetas):
        walk(theta, slot, 0, 2)
    x[s] -= OUTER_RATE * np.mean([x[s] - theta[s] for theta in thetas], axis=0)
    agree(shards.whole(), x, rtol=1e-5, atol=1e-6)
    for player in everybody[:2]:
        theta = thetas[player.slot]
        y = theta.copy()
        walk(theta, player.slot, 2, 3)
        theta[s] += x[s] - y[s]
        agree(player.parameters, theta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batches", [2, 3, 4])
def test_at_the_end_of_the_data_all_of_it_is_pushed_wherever_in_a_round(batches):
    shards, everybody = replicas(density=0.1, overlap=False)
    for player in everybody:
        give(player, 0, batches)
    advance(everybody)
    for _ in range(2):
        for player in everybody:
            player.tell_none()
        advance(everybody)
    for player in everybody:
        assert np.count_nonzero(player.pushed) == SIZE
        np.testing.assert_allclose(player.parameters, shards.whole(), rtol=1e-5, atol=1e-6)


def test_what_a_compressor_leaves_is_part_of_a_later_push():
    _, everybody = replicas(density=1.0, overlap=False)
    for player in everybody:
        give(player, 0, 2)
    advance(everybody)
    side = everybody[0].side
    place, left = side.parameters.copy(), np.full(SIZE, 0.25, np.float32)
    side.residual[:] = left
    side.arrival.before(0, SIZE)
    side.parameters[:] = everybody[0].shards.whole()
    side.arrival.after(0, SIZE)
    np.testing.assert_allclose(side.parameters, place - left, rtol=1e-5, atol=1e-6)
    assert not side.residual.any()


def test_a_push_is_of_the_mask_alone_and_at_the_end_of_all():
    _, everybody = replicas(density=0.1, overlap=False)
    for player in everybody:
        give(player, 0, 2)
    advance(everybody)
    player = everybody[0]
    assert np.flatnonzero(player.pushed).tolist() == mask(0, SIZE, 0.1).tolist()
    for player in everybody:
        give(player, 2, 3)
    advance(everybody)
    for player in everybody:
        player.tell_none()
    advance(everybody)
    assert np.count_nonzero(everybody[0].pushed) == SIZE
