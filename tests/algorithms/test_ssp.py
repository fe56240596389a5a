"""SSP against its rules: what is read, who waits, and whom nobody waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import OWN_LR
from by_hand import Player, Shards

from dlctl.algorithms.methods.ssp import SSP, Clocks, Options
from dlctl.algorithms.needs import NextBatch, Read, Step
from dlctl.algorithms.roster import AHEAD_MAX, IDLE
from dlctl.compress.base import Delta
from dlctl.optim.sgd import SGD, SGDOptions
from dlctl.shards.memory import in_memory
from dlctl.wire.messages import APPLIED, REFUSED, Packed, Push

SIZE = 6
START = np.ones(SIZE, np.float32)


def gradient_of(w: np.ndarray[Any, Any], batch: list[int]) -> Step:
    """Of |w - x|^2 / 2, where x is the batch's own."""
    x = np.random.default_rng(batch).standard_normal(SIZE).astype(np.float32)
    return Step((w - x).astype(np.float32), 1, 1.0)


def players(workers: int, servers: int = 2, **options: int) -> list[Player]:
    shards = Shards(SSP, START, servers, Options(**options))
    for table in shards.tables:  # The shards of by_hand have a rate of 0.1.
        for shard in table.shards:
            shard.lr = 1.0
    shards.members(frozenset(range(workers)))
    everybody = [Player(SSP, shards, gradient_of, slot) for slot in range(workers)]
    for player in everybody:
        player.side.options = Options(**options)
    return everybody


def give(player: Player, steps: int) -> None:
    number = len(player.todo)
    player.todo += [
        (NextBatch(0, player.slot, step == steps - 1), [player.slot, number + step])
        for step in range(steps)
    ]


def computed(player: Player, of: int) -> int:
    return of - len(player.todo)


@pytest.mark.oracle("ssp", "sums of updates, clock by clock (staleness 0)")
@pytest.mark.parametrize("servers", [1, 3])
def test_without_staleness_all_updates_of_a_clock_are_added_before_the_next_one(servers, agree):
    steps, everybody, w = 6, players(3, servers, staleness=0), START
    for step in range(steps):
        w = w if step > 1 else everybody[0].shards.whole().astype(float)  # They begin one by one.
        for player in everybody:
            player.todo = [(NextBatch(0, player.slot, step == steps - 1), [player.slot, step])]
        for player in [*everybody, *everybody]:
            player.advance()
        assert not any(player.todo for player in everybody)
        w = w - OWN_LR * sum(gradient_of(w, [slot, step]).gradient for slot in range(3))
    agree(everybody[0].shards.whole(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("every", [1, 100])
def test_the_fastest_waits_when_it_is_so_far_ahead_and_goes_on_when_the_slowest_does(
    staleness, every
):
    fast, slow = everybody = players(2, staleness=staleness, fetch_every_clocks=every)
    give(fast, 10)
    fast.advance()
    assert computed(fast, 10) == staleness + 1
    assert isinstance(fast.request, Read)
    assert all(side.waits_for() == {1} for side in fast.shards.sides)
    for done in range(1, 4):
        give(slow, 1)
        slow.advance()
        fast.advance()
        assert computed(fast, 10) == staleness + 1 + done
        assert fast.side.view.clock_min >= fast.side.clock - 1 - staleness
    for player in everybody:
        player.todo.clear()


def test_a_replica_without_data_holds_nobody_and_begins_again_with_the_slowest():
    fast, slow = players(2, staleness=1)
    slow.tell_none()
    give(fast, 7)
    fast.advance()
    assert not fast.todo
    give(slow, 1)
    slow.advance()
    assert slow.side.clock == fast.side.clock + 1 == 8
    assert [side.clock() for side in fast.shards.sides] == [7, 7]


@pytest.mark.oracle("ssp", "SGD alone, one replica")
def test_a_large_staleness_waits_for_nobody_and_one_replica_is_its_own_optimiser(agree):
    (player,) = players(1, staleness=1000)
    give(player, 20)
    player.advance()
    w = START.astype(float)
    for step in range(20):
        w = w - OWN_LR * gradient_of(w, [0, step]).gradient
    agree(player.shards.whole(), w, rtol=1e-5, atol=1e-6)
    fast, _ = players(2, staleness=1000)
    give(fast, 50)
    fast.advance()
    assert not fast.todo


def test_a_replica_sees_its_own_updates_without_reading_and_others_when_it_reads():
    first, second = players(2, staleness=3, fetch_every_clocks=100)
    give(first, 3)
    first.advance()
    fetches = first.fetches
    w = START.astype(float)
    for step in range(3):
        w = w - OWN_LR * gradient_of(w, [0, step]).gradient
    np.testing.assert_allclose(first.parameters, w, rtol=1e-5)
    give(second, 4)
    second.advance()
    np.testing.assert_allclose(first.parameters, w, rtol=1e-5)
    assert first.fetches == fetches, "its cache is new enough"
    give(first, 2)
    first.advance()
    assert first.fetches == fetches + 1
    np.testing.assert_allclose(first.parameters, first.shards.whole(), rtol=1e-5)


def test_what_a_compressor_keeps_back_is_on_top_of_what_is_read():
    (player,) = players(1)
    side = player.side
    side.residual[:] = 0.5
    side.parameters[:] = 3.0
    side.arrival.after(0, SIZE)
    assert side.parameters.tolist() == [2.5] * SIZE


def test_several_steps_make_one_clock_and_what_there_is_if_data_ends():
    (player,) = players(1, clock_steps=4)
    give(player, 6)
    player.advance()
    assert player.side.clock == 1
    player.tell_none()
    assert player.side.clock == 2
    assert player.samples_pushed == 6
    assert [side.clock() for side in player.shards.sides] == [2, 2]


# ---------------------------------------------------------------- one shard


def new_side() -> Clocks:
    return Clocks(Options(), in_memory(SGD(SGDOptions(lr=1.0)), np.zeros(2, np.float32)))


@pytest.fixture
def side() -> Clocks:
    side = new_side()
    side.members(frozenset({0, 1, 2}))
    return side


def push(side: Clocks, slot: int, clock: int, samples: int = 8) -> str:
    packed = Packed("none", 2, (np.ones(2, np.float32),))
    message = Push(slot, 1, 1, 0, 0, 0, 0, samples, clock, packed, 0)
    (outcome,) = side.push(message, Delta(np.ones(2, np.float32)))
    return outcome.kind


def test_the_clock_is_that_of_the_slowest_and_empty_pushes_move_it(side):
    assert [push(side, 0, 4), push(side, 1, 2), push(side, 2, 3)] == [APPLIED] * 3
    assert (side.clock(), side.shard.version) == (2, 3)
    assert push(side, 1, 5, samples=0) == APPLIED
    assert (side.clock(), side.shard.version) == (3, 3)
    assert side.may_read(0, 3)
    assert not side.may_read(0, 4)
    assert side.waits_for() == {2}


def test_the_dead_are_not_counted_and_who_joins_is_counted_from_its_first_push_on(side):
    for slot, clock in ((0, 9), (1, 2), (2, 6)):
        push(side, slot, clock)
    side.members(frozenset({0, 2}))
    assert side.clock() == 6
    side.members(frozenset({0, 1, 2}))
    side.joined(1)
    push(side, 2, 9)
    assert side.clock() == 9, "the one that joins has not said where it begins"
    push(side, 1, 6, samples=0)
    assert side.clock() == 9, "it never goes back"
    push(side, 0, 12)
    push(side, 2, 12)
    assert side.clock() == 9, "the one that has joined holds it now"
    push(side, 1, IDLE, samples=0)
    assert side.clock() == 12


def test_a_server_that_takes_the_place_holds_back_as_the_one_before_did(side):
    for slot, clock in ((0, 5), (1, 2), (2, 4)):
        push(side, slot, clock)
    other = new_side()
    other.resume(side.state())
    assert other.clock() == 2
    other.members(frozenset({0, 1, 2}))
    assert (other.clock(), other.state()) == (2, side.state())
    push(other, 1, 3)
    assert other.clock() == 3


def test_from_a_checkpoint_all_begin_where_the_shard_was(side):
    for slot, clock in ((0, 5), (1, 2), (2, 4)):
        push(side, slot, clock)
    other = new_side()
    other.restore(side.state())
    other.members(frozenset({0, 1}))
    push(other, 0, 3)
    assert other.clock() == 2
    push(other, 1, 3)
    assert other.clock() == 3


def test_poison_moves_the_clock_and_no_push_takes_it_to_the_end_of_all_numbers(side):
    packed = Packed("none", 2, (np.ones(2, np.float32),))
    message = Push(0, 1, 1, 0, 0, 0, 0, 8, 7, packed, 0)
    (outcome,) = side.left_out(message, "poison")
    assert outcome.kind == REFUSED
    push(side, 1, 7)
    push(side, 2, 7)
    assert (side.clock(), side.shard.version) == (7, 2)
    assert push(side, 0, 8 + AHEAD_MAX) == REFUSED
    assert IDLE > AHEAD_MAX
