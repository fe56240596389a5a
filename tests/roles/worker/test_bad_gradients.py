"""Pushes that were refused in a row, as a worker counts them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dlctl.roles.protocol.effects import Compute, Computed
from dlctl.roles.worker.bad_gradients import BATCHES_KEPT, BadGradients


def test_a_push_that_all_shards_have_taken_ends_the_row() -> None:
    poison = BadGradients(1e9)
    poison.refused("its norm is too large", 5, 5)
    poison.accepted()
    assert (poison.pushes, poison.pushes_in_row) == (1, 0)
    poison.refused("its norm is too large", 7, 7)
    assert (poison.pushes, poison.pushes_in_row) == (2, 1)


def test_the_batches_of_a_refused_push_are_named_and_no_others() -> None:
    poison = BadGradients(1e9)
    for step, where in enumerate(["samples 0..7", "samples 8..15", "samples 16..23"]):
        poison.computed(step, where)
    poison.refused("its norm is too large", 0, 0)
    assert (poison.last, poison.reason) == ("samples 0..7", "its norm is too large")
    poison.refused("its norm is too large", 1, 2)
    assert poison.last == "samples 8..15, samples 16..23"


def test_of_many_batches_the_newest_are_named_and_of_forgotten_ones_the_steps() -> None:
    poison = BadGradients(1e9)
    for step in range(BATCHES_KEPT + 10):
        poison.computed(step, f"batch {step}")
    poison.refused("", 20, 40)
    assert poison.last == ", ".join(f"batch {step}" for step in range(33, 41))
    poison.refused("", 0, 9)
    assert poison.last == "steps 0 to 9"
    poison.refused("", 8, 11)
    assert poison.last == "batch 10, batch 11"


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
