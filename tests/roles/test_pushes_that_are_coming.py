"""A push is worked on while it comes. Before it has come and was taken, nothing is to be seen of
it, and whoever may not push does not get that far.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlctl import messages as m
from dlctl import registry
from dlctl.algorithms.sync import Barrier
from dlctl.machine import Coming
from dlctl.messages import APPLIED, REFUSED, Packed

sys.path.insert(0, str(Path(__file__).parent))
from test_server_restart import SIZE, Keeping, Life, at_work

HALF = SIZE // 2 * 4
"""Bytes."""


@pytest.fixture
def keeping() -> Keeping:
    return Keeping()


@pytest.fixture
def life(keeping: Keeping) -> Life:
    return at_work(keeping)


def comes(life: Life, push: m.Push, nbytes: int = HALF, peer: bytes = b"worker") -> list[Any]:
    return life.server.handle(Coming(peer, push, nbytes), 0.0)


def points_of(keeping: Keeping) -> list[str]:
    """What the shard passes from now on."""
    passed: list[str] = []
    keeping.point = passed.append
    return passed


def test_it_is_worked_on_and_nothing_is_said(life: Life, keeping: Keeping) -> None:
    passed = points_of(keeping)
    push = life.message(0, [-1, -2, np.nan, np.nan])
    assert comes(life, push) == []
    assert passed == ["block updated"]
    assert (life.w, life.version) == ([0, 0, 0, 0], 0)
    push.delta.arrays[0][2:] = (-3, -4)
    (ack,) = life.ask(push)
    assert (ack.outcome, life.w, life.version) == (APPLIED, [1, 2, 3, 4], 1)


def test_who_may_not_push_has_nothing_worked_on(life: Life, keeping: Keeping) -> None:
    life.push(0)
    life.join(slot=1, epoch=2)
    passed = points_of(keeping)
    new = life.message(1)
    for wrong in (
        replace(new, seq=0), replace(new, seq=2), replace(new, epoch=2), replace(new, generation=2),
        replace(new, slot=1), replace(new, slot=7), life.message(0, slot=1, epoch=1),
    ):  # fmt: skip
        assert comes(life, wrong) == []
    assert comes(life, new, peer=b"another") == []
    assert passed == []
    comes(life, new)
    assert passed


@pytest.mark.parametrize(
    "arrays",
    [
        (),
        (np.ones(SIZE + 1, np.float32),),
        (np.ones(SIZE, np.float16),),
        (np.ones(SIZE, np.float32), np.ones(3, np.uint8)),
    ],
)
def test_what_is_not_all_of_the_shard_as_it_is_waits_until_it_has_come(
    life: Life, keeping: Keeping, arrays: Any
) -> None:
    passed = points_of(keeping)
    push = replace(life.message(0), delta=Packed("none", SIZE, arrays))
    assert comes(life, push, 8) == []
    assert passed == []


def test_poison_that_was_worked_on_is_refused_and_forgotten(life: Life) -> None:
    poison = life.message(0, [1, 1, np.inf, 0])
    comes(life, poison)
    assert [ack.outcome for ack in life.ask(poison)] == [REFUSED]
    assert life.push(1, [-5, 0, 0, 0]) == [(1, APPLIED)]
    assert life.w == [5, 0, 0, 0]


def test_a_push_that_never_comes_to_its_end_is_sent_again(life: Life) -> None:
    comes(life, life.message(0, [-1, -2, np.nan, np.nan]))
    assert life.push(0, [-1, -2, -3, -4]) == [(0, APPLIED)]
    assert life.w == [1, 2, 3, 4]


def test_what_a_barrier_holds_is_not_worked_on(keeping: Keeping) -> None:
    life = Life(keeping, algorithm=registry.load("algorithms", "sync"))
    assert not Barrier.applies_as_pushed
    life.tell(m.Members((0,)))
    life.join()
    life.initialise()
    passed = points_of(keeping)
    comes(life, life.message(0))
    assert passed == []


def test_other_messages_that_are_coming_are_left_alone(life: Life) -> None:
    values = np.zeros(SIZE, np.float32)
    message = m.Initialise(0, 1, values, np.zeros(2), np.zeros(1, np.float32))
    assert life.server.handle(Coming(b"worker", message, 8), 0.0) == []
