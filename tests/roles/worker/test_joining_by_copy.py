"""A replica that joins without servers, and waits for the model of another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlctl.errors import JobFailed
from dlctl.roles.worker.services.taking_over import ROUND_S, ROUNDS_MAX, TakingOver


class Others:
    """What `Asking` is to it: keeps each question until the test answers it."""

    def __init__(self, *slots: int) -> None:
        self.identity = SimpleNamespace(slot=0)
        known = {slot: SimpleNamespace(term=1, takes_part=True) for slot in slots}
        self.members = SimpleNamespace(known=known)
        self.asked: list[tuple[int, Any]] = []

    def ask(self, slot: int, op: str, arrays: Any, until: float, then: Any, now: float) -> None:
        self.asked.append((slot, then))


def joining(*slots: int) -> tuple[TakingOver, Others, np.ndarray[Any, Any]]:
    others, parameters = Others(*slots), np.zeros(3, np.float32)
    side = SimpleNamespace(parameters=parameters)
    return TakingOver(others, side), others, parameters  # type: ignore[arg-type]


def test_it_begins_with_the_model_of_the_first_that_has_one():
    taking, others, parameters = joining(1, 2)
    assert not taking.advance(0.0)
    others.asked[0][1](None)
    assert not taking.advance(1.0)
    assert [slot for slot, _ in others.asked] == [1, 2]
    others.asked[1][1]((np.ones(3, np.float32),))
    assert taking.advance(2.0)
    assert parameters.tolist() == [1, 1, 1]


def test_who_was_asked_is_waited_for_without_a_deadline():
    """A deadline in the past would have the loop turn without a pause."""
    taking, _, _ = joining(1)
    assert not taking.advance(0.0)
    assert taking.deadline() is None
    assert not taking.advance(10 * ROUNDS_MAX * ROUND_S)
    assert taking.phase().whom == ("worker-1",)


def test_all_are_asked_again_until_it_gives_up():
    """Who was asked too early may have the model a moment later."""
    taking, others, _ = joining(1)
    now = 0.0
    for number in range(1, ROUNDS_MAX + 1):
        assert not taking.advance(now)
        assert len(others.asked) == number
        others.asked[-1][1](None)
        assert not taking.advance(now)
        assert taking.deadline() == now + ROUND_S
        now += ROUND_S
    with pytest.raises(JobFailed):
        taking.advance(now)


def test_who_has_not_begun_yet_may_have_it():
    taking, others, _ = joining(1)
    others.members.known[1].takes_part = False
    for number in range(2 * ROUNDS_MAX):
        assert not taking.advance(number * ROUND_S)
    assert others.asked == []
