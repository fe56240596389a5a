"""A barrier's way over steps that nobody has pushed for."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.base import PushOutcome
from dlctl.algorithms.methods.sync import Options
from dlctl.algorithms.roster import AHEAD_MAX, IDLE
from dlctl.compress.base import Delta
from dlctl.optim.sgd import SGD, SGDOptions
from dlctl.shards.memory import in_memory
from dlctl.wire.messages import APPLIED, HELD, REFUSED, Packed, Push

FAR = 2**31
"""One by one, so many steps would take hours."""


@pytest.fixture
def barrier() -> Barrier:
    barrier = Barrier(Options(), in_memory(SGD(SGDOptions(lr=1.0)), np.zeros(2, np.float32)))
    barrier.members(frozenset({0, 1}))
    return barrier


def push_of(slot: int, clock: int, seq: int = 0) -> Push:
    packed = Packed("none", 2, (np.ones(2, np.float32),))
    return Push(slot, 1, 1, seq, clock, clock, clock, 8, clock, packed, 0)


def push(barrier: Barrier, slot: int, clock: int, seq: int = 0) -> list[tuple[int, str]]:
    message = push_of(slot, clock, seq)
    return kinds(barrier.push(message, Delta(message.delta.arrays[0])))


def kinds(outcomes: list[PushOutcome]) -> list[tuple[int, str]]:
    return [(outcome.slot, outcome.kind) for outcome in outcomes]


def test_a_push_for_a_far_step_is_reached_at_once_when_the_others_are_gone(
    barrier: Barrier,
) -> None:
    assert push(barrier, 0, FAR) == [(0, HELD)]
    assert kinds(barrier.members(frozenset({0}))) == [(0, APPLIED)]
    assert barrier.clock() == FAR + 1
    assert barrier.shard.w.tolist() == [-1.0, -1.0]


def test_on_its_way_to_a_far_step_it_stops_where_somebody_is_waited_for(barrier: Barrier) -> None:
    """Slot 1 counts from a step on that its push was for, and that push has to come again."""
    state = {"clocks": [[0, 0], [1, FAR]]}
    other = Barrier(Options(), barrier.shard)
    other.resume(state)
    other.members(frozenset({0, 1}))
    assert push(other, 0, 2 * FAR) == [(0, HELD)]
    assert other.clock() == FAR
    assert other.waits_for() == {1}
    assert push(other, 1, 2 * FAR) == [(1, HELD), (0, APPLIED), (1, APPLIED)]
    assert other.clock() == 2 * FAR + 1


def test_no_push_takes_a_shard_to_the_end_of_all_numbers(barrier: Barrier) -> None:
    """The version goes into commits and messages, where numbers end."""
    assert push(barrier, 0, 2**63 - 1) == [(0, REFUSED)]
    assert push(barrier, 0, IDLE) == [(0, REFUSED)]
    assert kinds(barrier.left_out(push_of(0, 2**63 - 1, seq=1), "poison")) == [(0, REFUSED)]
    assert barrier.members(frozenset({0})) == []
    assert barrier.clock() == 0
    assert push(barrier, 0, AHEAD_MAX, seq=2) == [(0, HELD), (0, APPLIED)]


def test_what_a_push_costs_does_not_grow_with_the_workers(
    barrier: Barrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, steps = range(40), 3
    barrier = Barrier(Options(), barrier.shard)
    barrier.members(frozenset(slots))
    looks: list[int] = []
    counted = barrier.roster.counted

    def look() -> dict[int, int]:
        looks.append(barrier.clock())
        return counted()

    monkeypatch.setattr(barrier.roster, "counted", look)
    for step in range(steps):
        for slot in (*slots[20:], *slots[:20]):
            assert barrier.clock() == step
            push(barrier, slot, step, step)
    assert barrier.clock() == steps
    assert len(looks) <= 3 * steps


class Compared(Barrier):
    """Compares what it has found once for each step with what it would find now."""

    def _is_complete(self, clock: int) -> bool:
        found = super()._is_complete(clock)
        newest = self._newest()
        assert found == (bool(newest) and not self._missing(newest, clock))
        return found


@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_made_as_soon_as_no_push_is_missing_and_never_sooner(seed: int) -> None:
    """Whatever happens before: slots leave, return, push for any step, or have no valid push."""
    rng, made = random.Random(seed), 0
    barrier = Compared(Options(), in_memory(SGD(SGDOptions(lr=1.0)), np.zeros(2, np.float32)))
    for seq in range(300):
        slot, before, act = rng.randrange(5), barrier.clock(), rng.random()
        if act < 0.8:
            message = push_of(slot, before + rng.choice([-1, 0, 0, 0, 0, 1, 2, 40]), seq)
            if act < 0.1:
                barrier.left_out(message, "poison")
            else:
                barrier.push(message, Delta(message.delta.arrays[0]))
        elif act < 0.9:
            barrier.joined(slot)
        elif act < 0.98:
            barrier.members(frozenset(rng.sample(range(5), rng.randrange(1, 6))))
        else:
            state = barrier.state()
            barrier = Compared(Options(), barrier.shard)
            barrier.resume(state)
        made += barrier.clock() > before
        assert not barrier._is_complete(barrier.clock())
    assert made > 20
