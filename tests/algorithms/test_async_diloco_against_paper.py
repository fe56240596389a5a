"""Asynchronous DiLoCo with several replicas in any order, against the loop of the paper in float64
(Liu et al. 2024, Alg. 2 and 3).
"""

from __future__ import annotations

import numpy as np
import pytest
from by_hand import Player, Shards

from dlctl.algorithms.methods.async_diloco import ASYNC_DILOCO, Options
from dlctl.algorithms.needs import NextBatch, Step
from dlctl.optim.delayed_nesterov import DelayedNesterov

P, SIZE, H, STEPS = 3, 5, 2, 120
INNER, OUTER, BETA = 0.2, 0.35, 0.6
TARGETS = np.random.default_rng(9).standard_normal((P, STEPS, SIZE)).astype(np.float32)


def gradient_of(w, batch):
    return Step(w - TARGETS[batch], 1, 1.0)


def outer() -> DelayedNesterov:
    return DelayedNesterov(DelayedNesterov.Options(lr=OUTER, momentum=BETA, every=P))


class Paper:
    """A push is the displacement by H steps; of every P-th one the momentum is made."""

    def __init__(self) -> None:
        self.theta, self.m, self.arrived = np.ones(SIZE), np.zeros(SIZE), np.zeros(SIZE)
        self.pushes = 0
        self.begun, self.x, self.clocks = [self.theta] * P, [self.theta] * P, [0] * P

    def step(self, i: int) -> None:
        if self.clocks[i] % H == 0:
            self.begun[i] = self.x[i] = self.theta
        self.x[i] = self.x[i] - INNER * (self.x[i] - TARGETS[i, self.clocks[i]])
        self.clocks[i] += 1
        if self.clocks[i] % H == 0:
            self.push(self.begun[i] - self.x[i])

    def push(self, displacement) -> None:
        self.arrived = self.arrived + displacement
        self.pushes += 1
        if self.pushes % P:
            self.theta = self.theta - OUTER * displacement / P
            return
        self.m = BETA * self.m + self.arrived / P
        self.theta = self.theta - OUTER * (BETA * self.m + displacement / P)
        self.arrived = np.zeros(SIZE)


@pytest.mark.oracle("async-diloco", "the loop of Liu 2024 in float64, 3 replicas")
def test_replicas_in_any_order_go_the_way_of_the_paper(agree):
    options = Options(local_steps=H, dynamic_steps=False)
    shards = Shards(ASYNC_DILOCO, np.ones(SIZE, np.float32), 2, options, outer)
    shards.members(frozenset(range(P)))
    everybody = [
        Player(ASYNC_DILOCO, shards, gradient_of, slot, own_lr=INNER, options=options)
        for slot in range(P)
    ]
    paper = Paper()
    for slot in np.random.default_rng(2).choice(P, p=[0.6, 0.3, 0.1], size=STEPS):
        everybody[slot].todo.append((NextBatch(0, 0, False), (slot, paper.clocks[slot])))
        everybody[slot].advance()
        paper.step(slot)
        agree(shards.whole(), paper.theta, rtol=1e-5, atol=1e-6)
    assert paper.pushes > 10 * P
