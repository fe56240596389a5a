"""Decoupled DiLoCo with several replicas, against a plain loop (Douillard 2026)."""

import numpy as np
import pytest
from by_hand import Player, Shards

from dlctl.algorithms.methods.decoupled_diloco import (
    DECOUPLED_DILOCO,
    Options,
    Syncer,
    radial,
)
from dlctl.algorithms.needs import NextBatch, Step
from dlctl.compress.base import Delta
from dlctl.job.config import Choice, Job, JobFile, Workers
from dlctl.model.flat import slice_bounds
from dlctl.wire.messages import APPLIED, HELD, LATE

REPLICAS, SIZE, BATCHES = 2, 7, 60
RATE, OUTER_RATE = 0.2, 0.1
"""Of a replica's steps; of the shards in `by_hand`, plain SGD."""
SAMPLES = (1, 3)
"""Of each batch of a replica."""
TARGETS = np.random.default_rng(11).standard_normal((REPLICAS, BATCHES, SIZE)).astype(np.float32)


def gradient(parameters, batch):
    """Towards another target with every batch of every replica."""
    slot, number = batch
    return Step(parameters - TARGETS[slot, number], SAMPLES[slot], 1.0)


def replicas(servers: int = 1, **options) -> tuple[Shards, list[Player]]:
    chosen = Options(**options)
    shards = Shards(DECOUPLED_DILOCO, np.ones(SIZE, np.float32), servers, chosen)
    shards.members(frozenset(range(REPLICAS)))
    everybody = [
        Player(
            DECOUPLED_DILOCO, shards, gradient, slot, own_lr=RATE, options=chosen,
            batch_size=SAMPLES[slot], samples_of=lambda batch: SAMPLES[batch[0]],
        )
        for slot in range(REPLICAS)
    ]  # fmt: skip
    for player in everybody:
        player.tell_none()  # It has not begun; now it takes part, and reads.
    return shards, everybody


def give(player: Player, batches: int, portion: int = 0, first: int = 0) -> None:
    made = [
        (NextBatch(0, portion, n == batches - 1), (player.slot, first + n)) for n in range(batches)
    ]
    player.todo += made


def advance(*everybody: Player) -> None:
    """Until each of them needs data or waits for another."""
    for _ in range(2 * BATCHES):
        for player in everybody:
            player.advance()


def merged(ways, weights, how):
    """The paper's merge, in float64."""
    if how == "mean":
        return np.average(ways, axis=0, weights=weights)
    norms = [np.linalg.norm(way) for way in ways]
    units = [way / norm for way, norm in zip(ways, norms, strict=True)]
    direction = np.average(units, axis=0, weights=weights)
    return np.average(norms, weights=weights) * direction / np.linalg.norm(direction)


class Loop:
    """All replicas in step, in float64."""

    def __init__(self, steps: int, fragments: int, delay: int, mix: float, merge: str) -> None:
        self.each, self.fragments, self.delay, self.mix = steps // fragments, fragments, delay, mix
        self.merge = merge
        self.server = np.ones(SIZE)
        self.thetas = [np.ones(SIZE) for _ in range(REPLICAS)]
        self.refs = [np.ones(SIZE) for _ in range(REPLICAS)]
        self.made = 0
        self.since = [0] * fragments

    def walk(self, steps: int) -> None:
        for _ in range(steps):
            for slot, theta in enumerate(self.thetas):
                theta -= RATE * (theta - TARGETS[slot, self.made])
            self.made += 1

    def exchange(self, clock: int, steps: int, delay: int) -> None:
        self.walk(steps)
        turn = clock % self.fragments
        part = slice(*slice_bounds(SIZE, self.fragments, turn))
        ways = [r[part] - t[part] for t, r in zip(self.thetas, self.refs, strict=True)]
        steps_since, self.since[turn] = self.made - self.since[turn], self.made
        tokens = [steps_since * samples for samples in SAMPLES]
        weights = [c * (c / steps_since) for c in tokens]
        self.walk(delay)
        self.server[part] -= OUTER_RATE * merged(ways, weights, self.merge)
        for theta, ref in zip(self.thetas, self.refs, strict=True):
            ref[part] = self.server[part]
            theta[part] = self.mix * theta[part] + (1 - self.mix) * self.server[part]

    def run(self, exchanges: int) -> None:
        for clock in range(exchanges):
            self.exchange(clock, self.each - (self.delay if clock else 0), self.delay)


@pytest.mark.oracle("decoupled-diloco", "the loop of Douillard 2026, all in step")
@pytest.mark.parametrize("merge", ["mean", "radial"])
@pytest.mark.parametrize(
    ("servers", "steps", "fragments", "delay", "mix"),
    [(1, 4, 1, 0, 0.0), (1, 6, 2, 1, 0.5), (1, 9, 3, 2, 0.25), (3, 8, 2, 3, 0.0)],
)
def test_if_all_are_waited_for_it_is_streaming_diloco_with_weights(
    servers, steps, fragments, delay, mix, merge, agree
):
    if servers > 1 and merge == "radial":
        return  # That is taken on each shard by itself.
    shards, everybody = replicas(
        servers, quorum=REPLICAS, local_steps=steps, fragments=fragments, delay_steps=delay,
        mix=mix, merge=merge,
    )  # fmt: skip
    exchanges = 7
    for player in everybody:
        give(player, exchanges * (steps // fragments) + delay)
    advance(*everybody)
    loop = Loop(steps, fragments, delay, mix, merge)
    loop.run(exchanges)
    agree(shards.whole(), loop.server, rtol=1e-5, atol=1e-6)
    for player, theta in zip(everybody, loop.thetas, strict=True):
        agree(player.parameters, theta, rtol=1e-5, atol=1e-6)


def test_lengths_and_directions_are_averaged_apart():
    ways = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
    shares = [np.float32(0.75), np.float32(0.25)]
    where = np.array([1, 2])
    found = radial([Delta(way, where) for way in ways], shares, Delta(ways[0]), 4)
    np.testing.assert_array_equal(found.indices, where)
    np.testing.assert_allclose(found.values, merged(ways, shares, "radial"), rtol=1e-6)
    assert np.linalg.norm(found.values) == pytest.approx(3.25)
    mean = Delta(np.zeros(2, np.float32))
    assert radial([Delta(ways[0]), Delta(-ways[0])], [np.float32(0.5)] * 2, mean, 2) is mean


# ---------------------------------------------------------------- who is late


LATE_OPTIONS = {
    "quorum": 1, "local_steps": 4, "fragments": 4, "delay_steps": 0, "mix": 0.0, "merge": "mean",
}  # fmt: skip


def test_nobody_waits_for_the_slow_and_what_was_late_is_in_a_later_exchange():
    shards, (fast, slow) = replicas(**LATE_OPTIONS)
    give(slow, 1)
    give(fast, 6)
    fast.advance()
    assert shards.shards[0].version == 6
    before = shards.whole().copy()
    slow.advance()
    way = RATE * (1 - TARGETS[1, 0])
    outcomes = [shards.outcomes[0, 1, 1, number] for number in range(2)]
    assert outcomes == [[LATE], [HELD, APPLIED]], "it comes again for the newest, at once"
    lo, hi = slice_bounds(SIZE, 4, 6 % 4)
    after = before.copy()
    after[lo:hi] -= OUTER_RATE * way[lo:hi]
    np.testing.assert_allclose(shards.whole(), after, rtol=1e-5, atol=1e-6)
    assert shards.shards[0].version == 7
    np.testing.assert_allclose(slow.parameters, before - way, rtol=1e-5, atol=1e-6)
    assert (slow.samples_done, slow.samples) == (0, 3)
    slow.tell_none()
    advance(slow, fast)
    assert slow.samples_done == slow.samples
    assert sum(s.samples for s in shards.shards) == fast.samples + 3


def test_one_that_is_always_slow_counts_whenever_it_comes():
    shards, (fast, slow) = replicas(**LATE_OPTIONS)
    for turn in range(6):
        give(fast, 3, turn, 3 * turn)
        fast.advance()
        give(slow, 1, 10 + turn, turn)
        slow.advance()
    kinds = [kinds[-1] for (_, slot, *_), kinds in shards.outcomes.items() if slot == 1]
    assert kinds == [LATE] + 6 * [APPLIED]


def test_those_that_come_within_the_grace_period_count():
    shards, (first, second) = replicas(grace_s=0.5, **LATE_OPTIONS)
    shards.takes_time = True
    give(first, 1)
    give(second, 1)
    first.advance()
    shards.ask_lead(0, 0.4)
    assert shards.shards[0].version == 0
    second.advance()
    assert shards.shards[0].version == 1
    advance(first, second)
    give(first, 1, 1, 1)
    first.advance()
    shards.ask_lead(1, 0.5)
    assert shards.shards[0].version == 2


def test_who_explodes_drops_it_and_goes_on_from_what_the_servers_have():
    shards, (player, other) = replicas(**LATE_OPTIONS)

    def explodes(parameters, batch):
        if batch[1] == 1:
            return Step(np.full(SIZE, np.float32(1e38)), 1, 1.0)
        return gradient(parameters, batch)

    player.gradient = explodes
    give(player, 10)
    give(other, 10)
    advance(player, other)
    assert (player.samples, other.samples) == (10, 30)
    assert np.abs(shards.whole()).max() < 10
    assert np.abs(player.parameters).max() < 10
    for one in (player, other):
        one.tell_none()
    advance(player, other)
    assert (player.samples_done, other.samples_done) == (10, 30)


# ---------------------------------------------------------------- the lead


@pytest.mark.parametrize(
    ("came", "members", "waited_s", "answer"),
    [
        ({0: 4}, {0, 1, 2}, 1.0, None),
        ({0: 4, 1: 4}, {0, 1, 2}, 1.0, 1.5),
        ({0: 4, 1: 4}, {0, 1, 2}, 9.0, 9.5),
        ({0: 4, 1: 4, 2: 4}, {0, 1, 2}, 1.0, {0, 1, 2}),
        ({0: 4, 1: 0}, {0, 1, 2}, 1.0, None),
        ({0: 4, 1: 0}, {0, 1}, 1.0, {0, 1}),
        ({0: 0, 1: 0, 2: 0}, {0, 1, 2}, 1.0, {0, 1, 2}),
        ({0: 4}, {0}, 1.0, {0}),
    ],
)
def test_when_an_exchange_is_made(came, members, waited_s, answer):
    lead = Syncer(Options(quorum=2, grace_s=0.5))
    assert lead.quorum(3, came, frozenset(members), waited_s) == answer
    if isinstance(answer, float):
        assert lead.quorum(3, came, frozenset(members), answer) == came.keys()


def test_the_grace_period_is_half_of_the_time_that_replicas_have_anyway():
    lead = Syncer(Options(quorum=2, local_steps=40, fragments=4, delay_steps=4))
    members = frozenset(range(3))
    assert lead.quorum(0, {0: 1}, members, 5.7) is None
    # It has made 6 steps since the newest exchange, in 6 s: 4 more take 4 s, 0.3 s are gone.
    assert lead.quorum(0, {0: 1, 1: 1}, members, 6.0) == pytest.approx(6.0 + (4.0 - 0.3) / 2)
    assert lead.quorum(0, {0: 1, 1: 1}, members, 7.86) == {0, 1}
    assert Syncer(Options(delay_steps=0)).quorum(0, {0: 1}, members, 5.0) == {0}


def test_no_more_than_all_can_be_waited_for():
    job = JobFile(
        job=Job(name="a", task="none"), workers=Workers(count=2),
        algorithm=Choice(
            name="decoupled-diloco",
            options={"quorum": 3, "local_steps": 100, "fragments": 4, "delay_steps": 1},
        ),
    )  # fmt: skip
    ((where, what, _),) = DECOUPLED_DILOCO.check(job)
    assert (where, what) == (("algorithm", "quorum"), "of 2 workers 3 are waited for")
