"""Gossip: what a contact does to both replicas, and what it conserves."""

from __future__ import annotations

import numpy as np
import pytest
from serverless_replicas import LR, SIZE, players, step

from dlctl.algorithms.methods.gossip import GOSSIP


@pytest.mark.oracle("gossip", "a loop of the paper, two replicas")
@pytest.mark.parametrize("mode", ["pull", "push", "symmetric"])
def test_two_replicas_are_the_loop_of_the_paper(mode, agree):
    both = players(GOSSIP, 2, LR, mode=mode, contact_every_steps=2, mix=0.25)
    w = [player.parameters.astype(np.float64) for player in both]
    for number in range(8):
        for i, j in ((0, 1), (1, 0)):
            step(both[i], number)
            x = np.random.default_rng([i, number]).standard_normal(SIZE)
            w[i] -= LR * (w[i] - x)
            if number % 2:
                delta = 0.25 * (w[i] - w[j])
                w[j] += delta * (mode != "pull")
                w[i] -= delta * (mode != "push")
    agree(both[0].parameters, w[0], atol=1e-5)
    agree(both[1].parameters, w[1], atol=1e-5)
    assert both[0].side.figures()["exchanges"] > 0


@pytest.mark.oracle("gossip", "the mean of all replicas, without gradients")
def test_symmetric_contacts_conserve_the_mean_and_bring_all_together(agree):
    everybody = players(GOSSIP, 4, 0.0)
    before = np.mean([player.parameters for player in everybody], axis=0, dtype=np.float64)
    for number in range(30):
        for player in everybody:
            step(player, number)
    agree(np.mean([p.parameters for p in everybody], axis=0, dtype=np.float64), before, atol=1e-6)
    assert max(np.abs(player.parameters - before).max() for player in everybody) < 1e-3


def test_pull_and_push_do_not():
    for mode in ("pull", "push"):
        everybody = players(GOSSIP, 4, 0.0, mode=mode)
        before = np.mean([player.parameters for player in everybody], axis=0)
        for number in range(10):
            for player in everybody:
                step(player, number)
        after = np.mean([player.parameters for player in everybody], axis=0)
        assert np.abs(after - before).max() > 1e-3
