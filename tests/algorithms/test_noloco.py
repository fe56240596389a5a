"""NoLoCo: an outer step with one other replica, and what holds replicas together."""

from __future__ import annotations

import numpy as np
import pytest
from serverless_replicas import LR, SIZE, players, step

from dlctl.algorithms.methods.noloco import NOLOCO
from dlctl.algorithms.needs import Step


@pytest.mark.oracle("noloco", "a loop of the paper, two replicas")
def test_two_replicas_are_the_loop_of_the_paper(agree):
    both = players(NOLOCO, 2, local_steps=3, outer_lr=0.7, outer_momentum=0.5, consensus=0.8)
    theta = [player.parameters.astype(np.float64) for player in both]
    phi, delta = [w.copy() for w in theta], [np.zeros(SIZE), np.zeros(SIZE)]
    for number in range(12):
        for i, j in ((0, 1), (1, 0)):
            step(both[i], number)
            x = np.random.default_rng([i, number]).standard_normal(SIZE)
            theta[i] = theta[i] - LR * (theta[i] - x)
            if number % 3 == 2:
                way = (theta[i] - phi[i] + theta[j] - phi[j]) / 2
                middle = (phi[i] + phi[j]) / 2
                delta[i] = 0.5 * delta[i] + 0.7 * way - 0.8 * (phi[i] - middle)
                phi[i] = phi[i] + delta[i]
                theta[i] = phi[i].copy()
    for player, own in zip(both, theta, strict=True):
        agree(player.parameters, own, atol=1e-5)
        assert player.side.figures() == {"outer_steps": 4, "alone": 0}


@pytest.mark.oracle("noloco", "local SGD with an outer momentum, one replica")
def test_alone_it_is_local_sgd_with_an_outer_momentum(agree):
    (alone,) = players(NOLOCO, 1, local_steps=2)
    theta = alone.parameters.astype(np.float64)
    phi, delta = theta.copy(), np.zeros(SIZE)
    for number in range(8):
        step(alone, number)
        theta = theta - LR * (theta - np.random.default_rng([0, number]).standard_normal(SIZE))
        if number % 2:
            delta = 0.5 * delta + 0.7 * (theta - phi)
            phi = phi + delta
            theta = phi.copy()
    agree(alone.parameters, theta, atol=1e-5)


def test_without_gradients_replicas_come_together():
    everybody = players(NOLOCO, 4, local_steps=1)
    for player in everybody:
        player.gradient = lambda w, batch: Step(np.zeros(SIZE, np.float32), 1, 1.0)
    apart = np.std([player.parameters for player in everybody], axis=0).max()
    for number in range(200):
        for player in everybody:
            step(player, number)
    assert np.std([player.parameters for player in everybody], axis=0).max() < 1e-3 * apart
