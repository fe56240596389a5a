"""A push is worked on while it comes. Before it has come and was taken, nothing is to be seen of
it, and whoever may not push does not get that far.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from server_lives import SIZE, Keeping, Life, at_work

from dlctl import registry
from dlctl.algorithms.barrier import Barrier
from dlctl.optim.adagrad import Adagrad
from dlctl.optim.sgd import SGD
from dlctl.roles.protocol.authz import OFFENCES_MAX
from dlctl.roles.server import table_shard
from dlctl.wire import messages as m
from dlctl.wire.machine import Coming, Note, Received
from dlctl.wire.messages import APPLIED, REFUSED, Packed

HALF = SIZE // 2 * 4
"""Bytes."""
ALL = SIZE * 4


@pytest.fixture
def keeping() -> Keeping:
    return Keeping()


@pytest.fixture
def life(keeping: Keeping) -> Life:
    return at_work(keeping)


def comes(
    life: Life, push: m.Push, nbytes: int = HALF, peer: bytes = b"worker", identity: str = ""
) -> list[Any]:
    come = (nbytes, *[0] * len(push.delta.arrays[1:]))
    return life.server.handle(Coming(peer, push, come, identity), 0.0)


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
    life.join(slot=1, term=2)
    passed = points_of(keeping)
    new = life.message(1)
    for wrong in (
        replace(new, seq=0), replace(new, seq=2), replace(new, term=2), replace(new, shard_term=2),
        replace(new, slot=1), replace(new, slot=7), life.message(0, slot=1, term=1),
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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("optimizer", [SGD, Adagrad])
def test_poison_that_was_worked_on_is_refused_and_forgotten(
    keeping: Keeping, optimizer: type
) -> None:
    life = at_work(keeping, optimizer=optimizer)
    poison = life.message(0, [np.nan, 3e38, np.inf, 0])
    comes(life, poison, ALL)
    assert [ack.outcome for ack in life.ask(poison)] == [REFUSED]
    passed = points_of(keeping)
    comes(life, life.message(1, [-5, 0, 0, 0]))
    assert passed == ["block updated"], "the next one finds the place free"
    assert life.push(1, [-5, 0, 0, 0]) == [(1, APPLIED)]
    assert np.isfinite(life.w).all()
    assert life.w[1:] == [0, 0, 0]


@pytest.mark.parametrize("early_min", [SIZE, SIZE + 1])
def test_a_large_push_is_prepared_to_check_it_and_forgotten_if_it_is_refused(
    keeping: Keeping, early_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes at once, as in shared memory."""
    monkeypatch.setattr(table_shard, "EARLY_MIN", early_min)
    life = at_work(keeping)
    is_early = early_min == SIZE
    prepared = []
    for number, (values, outcome) in enumerate(
        [([-1, 0, 0, 0], APPLIED), ([np.nan, 0, 0, 0], REFUSED), ([0, 1e13, 0, 0], REFUSED),
         ([0, -2, 0, 0], APPLIED)]
    ):  # fmt: skip
        passed = points_of(keeping)
        (ack,) = life.ask(life.message(number, values))
        prepared.append("block updated" in passed)
        assert ack.outcome == outcome
    assert prepared == [True, is_early, is_early, True]
    assert life.w == [1, 2, 0, 0]


def test_what_a_worker_that_was_replaced_has_begun_is_forgotten(
    life: Life, keeping: Keeping
) -> None:
    comes(life, life.message(0))
    life.join(term=2)
    passed = points_of(keeping)
    comes(life, life.message(0, term=2))
    assert passed == ["block updated"]


def test_what_a_worker_that_has_left_has_begun_is_forgotten(life: Life, keeping: Keeping) -> None:
    life.tell(m.Members((0, 1)))
    life.join(slot=1)
    comes(life, life.message(0, slot=1))
    life.tell(m.Members((0,)))
    passed = points_of(keeping)
    comes(life, life.message(0))
    assert passed == ["block updated"]


def test_what_was_given_up_for_another_push_is_not_begun_again(
    life: Life, keeping: Keeping
) -> None:
    """A slow worker's push would be done anew with every push of a fast one."""
    life.join(slot=1)
    slow = life.message(0, [-7, 0, 0, 0], slot=1)
    comes(life, slow)
    passed = points_of(keeping)
    for seq in range(3):
        life.push(seq)
        passed.clear()
        comes(life, slow)
        assert passed == []
    life.tell(slow, b"worker")
    assert life.w == [10, 0, 0, 0]


def test_a_push_that_comes_faster_takes_the_place_of_one_that_does_not_come_on(
    life: Life, keeping: Keeping
) -> None:
    life.join(slot=1)
    slow, fast = life.message(0, slot=1), life.message(0)
    comes(life, slow, 4)
    passed = points_of(keeping)
    comes(life, fast)
    comes(life, slow)
    comes(life, fast)
    assert passed == ["block updated"], "both come on, and the first one is worked on"
    comes(life, fast)
    assert passed == ["block updated"] * 2
    comes(life, slow, ALL)
    assert passed == ["block updated"] * 2, "now the other one is"


def test_one_that_finds_another_at_work_is_begun_when_there_is_room(
    life: Life, keeping: Keeping
) -> None:
    life.join(slot=1)
    first, second = life.message(0), life.message(0, [-7, 0, 0, 0], slot=1)
    comes(life, first)
    passed = points_of(keeping)
    comes(life, second)
    assert passed == []
    life.tell(first, b"worker")
    passed.clear()
    comes(life, second)
    assert passed == ["block updated"]
    life.tell(second, b"worker")
    assert life.w == [8, 0, 0, 0]


def test_more_than_there_can_be_is_as_much_as_there_can_be(life: Life) -> None:
    push = life.message(0, [-1, -2, -3, -4])
    comes(life, push, 10 * ALL)
    life.tell(push, b"worker")
    assert life.w == [1, 2, 3, 4]


def test_who_speaks_for_another_offends_once_and_when_all_has_come() -> None:
    keeping = Keeping()
    life = at_work(keeping)
    names = {f"key-{slot}": f"worker-{slot}" for slot in (0, 1)}
    life.tell(m.AllowedPeers(1, json.dumps(names).encode()))
    passed = points_of(keeping)
    for _ in range(OFFENCES_MAX):
        assert comes(life, life.message(0), identity="worker-1") == []
    assert comes(life, life.message(0), identity="nobody") == []
    assert passed == []
    refused = life.server.handle(Received(b"worker", life.message(0), "worker-1"), 0.0)
    assert [type(effect) for effect in refused] == [Note]
    comes(life, life.message(0), identity="worker-0")
    assert passed == ["block updated"]


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
    message = m.Initialise(0, 1, values, np.zeros(2))
    assert life.server.handle(Coming(b"worker", message, (8, 0, 0)), 0.0) == []
