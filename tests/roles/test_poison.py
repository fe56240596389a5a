"""Pushes that were refused in a row, as a worker counts them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dlctl.roles.protocol.effects import Compute, Computed
from dlctl.roles.worker.bad_gradients import BATCHES_KEPT, BadGradients


def refuse(poison: BadGradients, number: int) -> None:
    poison.refused(number, "its norm is too large", number, number)


def test_a_push_that_one_shard_has_taken_and_another_one_refused_is_refused() -> None:
    poison = BadGradients(1e9)
    for number in range(5, 8):
        refuse(poison, number)
        poison.settled(number)
    assert (poison.pushes, poison.pushes_in_row) == (3, 3)


def test_a_push_is_counted_once_however_many_shards_refuse_it_and_in_whatever_order() -> None:
    poison = BadGradients(1e9)
    for number in (5, 6, 5, 6, 4):
        refuse(poison, number)
    assert (poison.pushes, poison.pushes_in_row) == (3, 3)


def test_a_push_that_all_shards_have_taken_ends_the_row() -> None:
    poison = BadGradients(1e9)
    refuse(poison, 5)
    poison.settled(5)
    poison.settled(6)
    assert (poison.pushes, poison.pushes_in_row) == (1, 0)
    refuse(poison, 7)
    assert (poison.pushes, poison.pushes_in_row) == (2, 1)


def test_the_batches_of_a_refused_push_are_named_and_no_others() -> None:
    poison = BadGradients(1e9)
    for step, where in enumerate(["samples 0..7", "samples 8..15", "samples 16..23"]):
        poison.computed(step, where)
    poison.refused(5, "its norm is too large", 0, 0)
    assert (poison.last, poison.reason) == ("samples 0..7", "its norm is too large")
    poison.refused(6, "its norm is too large", 1, 2)
    assert poison.last == "samples 8..15, samples 16..23"


def test_of_many_batches_the_newest_are_named_and_of_forgotten_ones_the_steps() -> None:
    poison = BadGradients(1e9)
    for step in range(BATCHES_KEPT + 10):
        poison.computed(step, f"batch {step}")
    poison.refused(5, "", 20, 40)
    assert poison.last == ", ".join(f"batch {step}" for step in range(33, 41))
    poison.refused(6, "", 0, 9)
    assert poison.last == "steps 0 to 9"
    poison.refused(7, "", 8, 11)
    assert poison.last == "batch 10, batch 11"


def test_an_older_push_that_is_settled_late_does_not_end_the_row() -> None:
    poison = BadGradients(1e9)
    refuse(poison, 6)
    poison.settled(5)
    assert poison.pushes_in_row == 1


@pytest.mark.parametrize(
    ("loss", "norm", "odd"),
    [
        (math.nan, 1.0, "loss nan"),
        (math.inf, math.inf, "loss inf"),
        (1.27e36, math.inf, "gradient of norm inf (its loss is 1.27e+36)"),
        (3.5, math.nan, "gradient of norm nan (its loss is 3.5)"),
        (
            3.5,
            2e9,
            "gradient of norm 2e+09, above what servers.push_norm_max allows (its loss is 3.5)",
        ),
    ],
)
def test_what_is_of_no_use_is_named(loss: float, norm: float, odd: str) -> None:
    effect = Compute(0, 0, 8, 0, norm_max=BadGradients(1e9).norm_max(None))
    is_usable = effect.is_usable(loss, norm)
    computed = Computed(loss, None, np.zeros(0), norm, is_usable)
    assert (computed.is_usable, computed.odd) == (False, odd)


@pytest.mark.parametrize(
    ("own_lr", "norm"), [(None, 1e9), (0.0, 1e9), (1e-3, 1e12), (1e9, 1.0), (1e-320, 1e308)]
)
def test_the_limit_is_that_of_the_push_which_comes_of_a_gradient(own_lr, norm) -> None:
    """`own_lr`: it is not the gradient that is pushed then but the step along it."""
    effect = Compute(0, 0, 8, 0, own_lr, norm_max=BadGradients(1e9).norm_max(own_lr))
    assert effect.is_usable(1.0, norm)
    assert not effect.is_usable(1.0, 2 * norm)
