"""Downpour with several replicas in any order, against the loops of the paper and of mpiT."""

from __future__ import annotations

import numpy as np
import pytest
from by_hand import Player, Shards

from dlctl.algorithms.methods.downpour import DOWNPOUR, Options
from dlctl.algorithms.needs import NextBatch, Step

P, SIZE, ALPHA, ETA, STEPS = 3, 6, 0.05, 0.1, 120
"""ETA: of the shards in `by_hand`, plain SGD."""
TARGETS = np.random.default_rng(3).standard_normal((P, STEPS, SIZE)).astype(np.float32)


def gradient_of(w, batch):
    return Step(w - TARGETS[batch], 1, 1.0)


def replicas(alpha: float, **options) -> tuple[Shards, list[Player]]:
    chosen = Options(overlap=False, **options)
    shards = Shards(DOWNPOUR, np.ones(SIZE, np.float32), 2, chosen)
    shards.members(frozenset(range(P)))
    everybody = [
        Player(DOWNPOUR, shards, gradient_of, slot, own_lr=alpha, options=chosen)
        for slot in range(P)
    ]
    return shards, everybody


class Client:
    """Dean et al. 2012, Alg. 1.1."""

    def __init__(self, slot: int, n_fetch: int, n_push: int) -> None:
        self.slot, self.n_fetch, self.n_push = slot, n_fetch, n_push
        self.number = 0
        self.accrued = np.zeros(SIZE)

    def step(self, server):
        if self.number % self.n_fetch == 0:
            self.w = server.copy()
        gradient = self.w - TARGETS[self.slot, self.number]
        self.accrued += gradient
        self.w = self.w - ALPHA * gradient
        if self.number % self.n_push == 0:
            server -= ETA * self.accrued
            self.accrued = np.zeros(SIZE)
        self.number += 1


class OfMpiT:
    """What the authors of EASGD compare with: the servers add tau local steps, and it goes on from
    what they have then. Its first push is a whole one, and it fetches when it goes on.
    """

    def __init__(self, slot: int, tau: int) -> None:
        self.slot, self.tau = slot, tau
        self.number = 0
        self.way = np.zeros(SIZE)

    def step(self, server):
        if self.number % self.tau == 0:
            self.w = server.copy()
        moved = -ETA * (self.w - TARGETS[self.slot, self.number])
        self.way += moved
        self.w = self.w + moved
        self.number += 1
        if self.number % self.tau == 0:
            server += self.way
            self.way = np.zeros(SIZE)


def order():
    """Replicas by lot, some of them more often than others."""
    return np.random.default_rng(4).choice(P, p=[0.6, 0.3, 0.1], size=STEPS)


def play(shards, everybody, loops, agree):
    server = np.ones(SIZE)
    for slot in order():
        player, loop = everybody[slot], loops[slot]
        player.todo.append((NextBatch(0, 0, False), (slot, loop.number)))
        player.advance()
        loop.step(server)
        agree(shards.whole(), server, rtol=1e-5, atol=1e-6)
        agree(player.parameters, loop.w, rtol=1e-5, atol=1e-6)


@pytest.mark.oracle("downpour", "Alg. 1.1 of Dean 2012 in float64, 3 replicas")
@pytest.mark.parametrize(("n_fetch", "n_push"), [(1, 1), (2, 3), (3, 2), (4, 4)])
def test_replicas_in_any_order_go_the_way_of_the_paper(n_fetch, n_push, agree):
    made = replicas(ALPHA, fetch_every_steps=n_fetch, push_every_steps=n_push)
    play(*made, [Client(slot, n_fetch, n_push) for slot in range(P)], agree)


@pytest.mark.oracle("downpour", "the loop of mpiT in float64, 3 replicas")
@pytest.mark.parametrize("tau", [1, 4])
def test_with_the_push_before_the_fetch_they_go_the_way_of_mpit(tau, agree):
    options = {"fetch_every_steps": tau, "push_every_steps": tau, "push_before_fetch": True}
    play(*replicas(ETA, **options), [OfMpiT(slot, tau) for slot in range(P)], agree)
