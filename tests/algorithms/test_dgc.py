"""Deep Gradient Compression with several replicas, against the loop of the paper in float64."""

import math

import numpy as np
import pytest
from by_hand import Player, Shards

from dlctl.algorithms.methods.dgc import DGC, Options
from dlctl.algorithms.needs import NextBatch, Step
from dlctl.wire.messages import Packed

REPLICAS, SIZE, SHARDS, EPOCHS, STEPS = 3, 40, 2, 4, 5
RATE = 0.1
"""Of the shards in `by_hand`, plain SGD."""
WARMUP, DENSITY = (0.5, 0.3), 0.15
BATCHES = EPOCHS * STEPS
TARGETS = np.random.default_rng(7).standard_normal((REPLICAS, BATCHES, SIZE)).astype(np.float32)


def gradient(parameters, batch):
    return Step(parameters - TARGETS[batch], 1, 1.0)


class Largest:
    """Top-k that sends zeros, too: the shards in `by_hand` want whole pushes."""

    def __init__(self):
        self.density = DENSITY

    def take(self, u, shard=0):
        where = np.argsort(-np.abs(u))[: int(self.density * len(u))]
        sent = np.zeros(len(u), np.float32)
        sent[where], u[where] = u[where], 0
        return Packed("none", len(u), (sent,))


def played(options: Options) -> tuple[Shards, list[Player]]:
    shards = Shards(DGC, np.ones(SIZE, np.float32), SHARDS, options)
    shards.members(frozenset(range(REPLICAS)))
    everybody = [Player(DGC, shards, gradient, n, options=options) for n in range(REPLICAS)]
    for player in everybody:
        player.side.members = frozenset(range(REPLICAS))
        player.training.writing.compressor = Largest()
        player.todo += [
            (NextBatch(epoch, 0, step == STEPS - 1), (player.slot, epoch * STEPS + step))
            for epoch in range(EPOCHS)
            for step in range(STEPS)
        ]
    for _ in range(2 * BATCHES):
        for player in everybody:
            player.advance()
    assert not any(player.todo for player in everybody)
    return shards, everybody


def by_paper(options: Options):
    """(w, every u, every v) after all steps, coordinate by coordinate."""
    m, w = options.momentum, np.ones(SIZE)
    u, v = np.zeros((REPLICAS, SIZE)), np.zeros((REPLICAS, SIZE))
    for number in range(BATCHES):
        epoch, mean = number // STEPS, np.zeros(SIZE)
        density = max(WARMUP[epoch] if epoch < len(WARMUP) else 0, DENSITY)
        for i in range(REPLICAS):
            g = w - TARGETS[i, number]
            if options.local_clip_norm:
                limit = options.local_clip_norm * REPLICAS**-0.5
                g *= min(1, limit / math.sqrt(g @ g))
            if options.nesterov:
                u[i] = m * (u[i] + g)
                v[i] = v[i] + u[i] + g
            else:
                u[i] = m * u[i] + g
                v[i] = v[i] + u[i]
            for lo in range(0, SIZE, SIZE // SHARDS):
                here = np.abs(v[i, lo : lo + SIZE // SHARDS])
                for at in lo + np.argsort(-here)[: int(density * here.size)]:
                    mean[at] += v[i, at] / REPLICAS
                    v[i, at] = u[i, at] = 0
        w -= RATE * mean
    return w, u, v


@pytest.mark.oracle("dgc", "the loop of Lin 2018 in float64, 3 replicas")
@pytest.mark.parametrize(
    "options",
    [
        Options(momentum=0.8, warmup_density=WARMUP),
        Options(momentum=0.8, warmup_density=WARMUP, nesterov=True, local_clip_norm=4.0),
    ],
    ids=["plain", "nesterov, clipped"],
)
def test_replicas_and_shards_are_the_loop_of_the_paper(options, agree):
    shards, everybody = played(options)
    w, u, v = by_paper(options)
    agree(shards.whole(), w, rtol=1e-5, atol=1e-6)
    for player in everybody:
        state = player.side.state()
        agree(state["velocity"], u[player.slot], rtol=1e-5, atol=1e-5)
        agree(state["residual"], v[player.slot], rtol=1e-5, atol=1e-5)
        assert player.training.writing.compressor.density == DENSITY


def test_what_was_sent_has_no_momentum_any_more():
    """Without the mask a coordinate that is sent goes on moving by gradients of long ago."""
    _, everybody = played(Options(momentum=0.9, warmup_density=()))
    state = everybody[0].side.state()
    restarted = state["velocity"] == 0
    assert int(DENSITY * SIZE) <= restarted.sum() < SIZE
    assert not state["residual"][restarted].any()
