"""Streaming DiLoCo with several replicas, against the paper's loop (Douillard 2025, Alg. 2)."""

import numpy as np
import pytest
from by_hand import Player, Shards

from dlctl.algorithms.methods.streaming_diloco import STREAMING_DILOCO, Options
from dlctl.algorithms.needs import NextBatch, Step
from dlctl.model.flat import slice_bounds

REPLICAS, SIZE, BATCHES = 2, 7, 40
RATE, OUTER_RATE = 0.2, 0.1
"""Of a replica's steps; of the shards in `by_hand`, plain SGD."""
TARGETS = np.random.default_rng(7).standard_normal((REPLICAS, BATCHES, SIZE)).astype(np.float32)


def gradient(parameters, batch):
    """Towards another target with every batch of every replica."""
    slot, number = batch
    return Step(parameters - TARGETS[slot, number], 1, 1.0)


def replicas(servers: int = 2, **options) -> tuple[Shards, list[Player]]:
    chosen = Options(**options)
    shards = Shards(STREAMING_DILOCO, np.ones(SIZE, np.float32), servers, chosen)
    shards.members(frozenset(range(REPLICAS)))
    everybody = []
    for slot in range(REPLICAS):
        player = Player(STREAMING_DILOCO, shards, gradient, slot, own_lr=RATE)
        player.side.options = chosen
        player.side.fragments.parts = chosen.fragments
        everybody.append(player)
    return shards, everybody


def give(player: Player, batches: int, portion: int = 0) -> None:
    made = [(NextBatch(0, portion, n == batches - 1), (player.slot, n)) for n in range(batches)]
    player.todo += made


def advance(everybody: list[Player]) -> None:
    """Until each of them needs data or waits for another."""
    for _ in range(2 * BATCHES):
        for player in everybody:
            player.advance()


class Paper:
    """All replicas in step, in float64."""

    def __init__(self, steps: int, fragments: int, delay: int, mix: float) -> None:
        self.each, self.fragments, self.delay, self.mix = steps // fragments, fragments, delay, mix
        self.server = np.ones(SIZE)
        self.thetas = [np.ones(SIZE) for _ in range(REPLICAS)]
        self.refs = [np.ones(SIZE) for _ in range(REPLICAS)]
        self.made = 0

    def walk(self, steps: int) -> None:
        for _ in range(steps):
            for slot, theta in enumerate(self.thetas):
                theta -= RATE * (theta - TARGETS[slot, self.made])
            self.made += 1

    def exchange(self, clock: int, steps: int, delay: int) -> None:
        self.walk(steps)
        part = slice(*slice_bounds(SIZE, self.fragments, clock % self.fragments))
        pairs = zip(self.thetas, self.refs, strict=True)
        ways = [ref[part] - theta[part] for theta, ref in pairs]
        self.walk(delay)
        self.server[part] -= OUTER_RATE * np.mean(ways, axis=0)
        for theta, ref in zip(self.thetas, self.refs, strict=True):
            ref[part] = self.server[part]
            theta[part] = self.mix * theta[part] + (1 - self.mix) * self.server[part]

    def run(self, exchanges: int) -> None:
        for clock in range(exchanges):
            self.exchange(clock, self.each - (self.delay if clock else 0), self.delay)


@pytest.mark.oracle("streaming-diloco", "the loop of Douillard 2025 in float64")
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    ("steps", "fragments", "delay", "mix"),
    [(4, 2, 0, 0.0), (6, 2, 0, 0.5), (6, 2, 1, 0.5), (9, 3, 2, 0.25), (8, 2, 3, 0.0)],
)
def test_replicas_in_step_are_the_loop_of_the_paper(servers, steps, fragments, delay, mix, agree):
    shards, everybody = replicas(
        servers, local_steps=steps, fragments=fragments, delay_steps=delay, mix=mix
    )
    exchanges = 7
    batches = exchanges * (steps // fragments) + delay
    for player in everybody:
        give(player, batches)
    advance(everybody)
    paper = Paper(steps, fragments, delay, mix)
    paper.run(exchanges)
    agree(shards.whole(), paper.server, rtol=1e-5, atol=1e-6)
    for player, theta in zip(everybody, paper.thetas, strict=True):
        agree(player.parameters, theta, rtol=1e-5, atol=1e-6)


def test_a_push_is_of_one_fragment_and_every_shard_goes_on():
    shards, everybody = replicas(3, local_steps=4, fragments=4, delay_steps=0)
    for player in everybody:
        give(player, 1)
    advance(everybody)
    lo, hi = slice_bounds(SIZE, 4, 0)
    assert everybody[0].pushed[lo:hi].all()
    assert not everybody[0].pushed[hi:].any()
    assert [shard.version for shard in shards.shards] == [1, 1, 1]


def test_steps_count_as_done_when_all_fragments_have_them():
    shards, everybody = replicas(local_steps=4, fragments=4, delay_steps=0)
    for player in everybody:
        give(player, 2)
    advance(everybody)
    assert [player.samples_done for player in everybody] == [0, 0]
    assert [player.samples_pushed for player in everybody] == [2, 2]
    for player in everybody:
        player.tell_none()
    advance(everybody)
    assert [player.samples_done for player in everybody] == [2, 2]
    assert shards.shards[0].version == 2 + 3


def test_what_is_saved_has_all_steps_in_full_and_the_run_goes_on():
    _, everybody = replicas(local_steps=4, fragments=4, delay_steps=0)
    for player in everybody:
        give(player, 2)
    advance(everybody)
    for player in everybody:
        assert player.training.writing.has_unpushed_steps()
        player.training.steps.holds = True
    advance(everybody)
    assert not any(player.training.writing.has_unpushed_steps() for player in everybody)
    for player in everybody:
        player.training.steps.holds = False
        give(player, 4, portion=1)
    advance(everybody)
    assert [player.samples for player in everybody] == [6, 6]


def test_a_restored_replica_goes_on_from_its_own_place():
    shards, everybody = replicas(local_steps=4, fragments=2, delay_steps=0, mix=0.5)
    player = everybody[0]
    for other in everybody:
        give(other, 4)
    advance(everybody)
    for other in everybody:
        other.tell_none()
    advance(everybody)
    state = {name: vector.copy() for name, vector in player.side.state().items()}
    assert not np.allclose(state["own"], shards.whole())
    again = Player(STREAMING_DILOCO, shards, gradient, 0, 2, own_lr=RATE)
    again.side.restore(state)
    again.advance()
    np.testing.assert_allclose(again.parameters, state["own"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(again.side.fragments.vector, shards.whole(), rtol=1e-5, atol=1e-6)


def test_who_explodes_drops_it_and_goes_on_from_what_the_servers_have():
    shards, everybody = replicas(local_steps=4, fragments=2, delay_steps=0)
    player, other = everybody

    def explodes(parameters, batch):
        if batch[1] == 1:
            return Step(np.full(SIZE, np.float32(1e30)), 1, 1.0)
        return gradient(parameters, batch)

    player.gradient = explodes
    for one in everybody:
        give(one, 2)
    advance(everybody)
    assert np.abs(shards.whole()).max() < 10
    for one in everybody:
        one.todo += [(NextBatch(0, 1, n == 9), (one.slot, n)) for n in range(2, 10)]
    advance(everybody)
    assert other.samples == 10
    assert np.abs(shards.whole()).max() < 10
    assert np.abs(player.parameters).max() < 10
