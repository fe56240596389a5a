"""FedBuff against the loop of the paper (Nguyen et al. 2022, Alg. 1)."""

import numpy as np
import pytest
from by_hand import Player, Shards

from dlctl.algorithms.base import PushKind
from dlctl.algorithms.methods.fedbuff import FEDBUFF, Options, Replica
from dlctl.algorithms.needs import NextBatch, Step
from dlctl.wire.messages import APPLIED, BUFFERED

P, SIZE, H, K = 3, 5, 2, 3
INNER, OUTER = 0.2, 0.1
"""OUTER: of the shards in `by_hand`, plain SGD."""
TARGETS = np.random.default_rng(9).standard_normal((P, 60, SIZE)).astype(np.float32)


def gradient_of(w, batch):
    return Step(w - TARGETS[batch], 1, 1.0)


def replicas(gradient=gradient_of, **more):
    options = Options(local_steps=H, buffer_pushes=K, **more)
    shards = Shards(FEDBUFF, np.ones(SIZE, np.float32), 2, options)
    shards.members(frozenset(range(P)))
    players = [
        Player(FEDBUFF, shards, gradient, slot, own_lr=INNER, options=options) for slot in range(P)
    ]
    return shards, players


def step(player, number):
    player.todo.append((NextBatch(0, 0, False), (player.slot, number)))
    player.advance()


class Paper:
    def __init__(self, weight):
        self.weight = weight
        self.theta, self.buffer = np.ones(SIZE), np.zeros(SIZE)
        self.pushes = self.steps = 0
        self.begun = [(self.theta, 0)] * P
        self.x = [self.theta] * P
        self.clocks = [0] * P
        self.staleness = []

    def step(self, i):
        if self.clocks[i] % H == 0:
            self.begun[i], self.x[i] = (self.theta, self.steps), self.theta
        self.x[i] = self.x[i] - INNER * (self.x[i] - TARGETS[i, self.clocks[i]])
        self.clocks[i] += 1
        if self.clocks[i] % H:
            return
        base, j = self.begun[i]
        self.staleness.append(self.steps - j)
        self.buffer = self.buffer + self.weight(self.steps - j) * (base - self.x[i])
        self.pushes += 1
        if self.pushes % K == 0:
            self.theta = self.theta - OUTER * self.buffer / K
            self.buffer, self.steps = np.zeros(SIZE), self.steps + 1


@pytest.mark.oracle("fedbuff", "the loop of Nguyen 2022 in float64")
@pytest.mark.parametrize(
    ("name", "weight"), [("constant", lambda tau: 1), ("root", lambda tau: (1 + tau) ** -0.5)]
)
def test_replicas_in_any_order_go_the_way_of_the_paper(name, weight, agree):
    shards, players = replicas(staleness_weight=name)
    paper = Paper(weight)
    rng = np.random.default_rng(2)
    for slot in rng.choice(P, p=[0.6, 0.3, 0.1], size=80):
        step(players[slot], paper.clocks[slot])
        paper.step(slot)
        agree(shards.whole(), paper.theta, rtol=1e-5)
    assert max(paper.staleness) >= 2
    assert [side.clock() for side in shards.sides] == [paper.steps] * 2
    kinds = [outcomes for (index, *_), outcomes in shards.outcomes.items() if index == 0]
    assert kinds.count([APPLIED]) == paper.pushes // K == paper.steps
    assert kinds.count([BUFFERED]) == paper.pushes - paper.steps


def test_where_data_ends_a_replica_pushes_what_it_has():
    shards, (player, *_) = replicas()
    step(player, 0)
    assert player.samples_pushed == 0
    player.tell_none()
    assert player.samples_pushed == player.samples == 1
    player.tell_none()
    assert len(shards.outcomes) == 2, "one push to each shard"


def test_a_round_that_comes_to_nothing_takes_no_place_in_the_buffer():
    def gradient(w, batch):
        return Step(np.full_like(w, 1e38 if batch[1] < H else 0), 1, 1.0)

    shards, (player, *_) = replicas(gradient)
    for number in range(2 * H):
        step(player, number)
    buffered = [shard.optimizer.counters["buffered"] for shard in shards.shards]
    assert buffered == [1, 1]
    np.testing.assert_array_equal(player.parameters, 1)


def test_what_one_push_holds():
    assert Replica.one_push(Options()) == PushKind(16, is_displacement=True)
    assert Options().buffer_pushes == 10
