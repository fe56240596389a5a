"""No push makes weights infinite, within the limits that the job file and `dlctl set` have.

The limits are read from the types: whoever moves one has these tests to convince.
"""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from annotated_types import Ge, Le
from update_loops import loops as loops

from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.job.config import Servers
from dlctl.optim.adagrad import Adagrad
from dlctl.optim.adam import Adam
from dlctl.optim.delayed_nesterov import DelayedNesterov
from dlctl.optim.lion import Lion
from dlctl.optim.momentum import Momentum
from dlctl.optim.rmsprop import RMSprop
from dlctl.optim.sgd import SGD
from dlctl.optim.yogi import Yogi
from dlctl.shards.memory import in_memory
from dlctl.util import numeric_limits

LARGEST = float(np.finfo(np.float32).max)
STEP_MAX = 2.0**103
"""No sum of steps below it comes to more than float32 can hold."""


def end_of(hint: Any, kind: type) -> float:
    (found,) = [c for c in get_args(hint)[1:] if isinstance(c, kind)]
    return float(found.le if kind is Le else found.ge)


LR, NORM = end_of(numeric_limits.LearningRate, Le), end_of(numeric_limits.PushNorm, Le)


def least_eps(kind: type) -> float:
    return end_of(get_type_hints(kind.Options, include_extras=True)["eps"], Ge)  # type: ignore[attr-defined]


EVERY_KIND = pytest.mark.parametrize(
    "kind", [SGD, Momentum, DelayedNesterov, Adagrad, Adam, Lion, RMSprop, Yogi]
)
STARTS = [0.0, 1e24, -1e24, 0.999 * LARGEST, -0.999 * LARGEST, LARGEST, -LARGEST]
PATTERNS = {
    "same": lambda step, rng: 1.0,
    "turns": lambda step, rng: (-1.0) ** step,
    "every other one": lambda step, rng: float(step % 2 == 0),
    "seldom": lambda step, rng: float(step % 50 == 0),
    "at random": lambda step, rng: rng.choice([-1.0, 0.0, 1e-38, 1.0]),
}
DECAYS = [(LR, 0.0), (LR, 1 / LR), (1.0, 1.0), (1e-3, 1.0)]
"""(lr, weight_decay): what they take is at most all of a weight at once."""
RMSPROP_WORST = {"alpha": 1 - 2.0**-53, "momentum": 0.99}
SUMS = [(0.9, False), (0.9, True), (0.9999, False), (0.9999, True)]
"""(momentum, nesterov)"""


def options_of(kind: Any) -> list[dict[str, Any]]:
    """The worst that a job file may say."""
    if kind is Adagrad:
        return [{"lr": LR, "eps": least_eps(kind), "initial_accumulator": 0.0}]
    if kind is DelayedNesterov:
        return [
            {"lr": LR, "momentum": momentum, "every": every, "spread": spread}
            for momentum in (0.9, 0.9999)
            for every, spread in ((1, 0.0), (4, 0.0), (4, 0.25))
        ]
    if kind is RMSprop:
        return [
            {"lr": LR, "eps": least_eps(kind), "alpha": alpha, "momentum": momentum}
            for alpha in (0.0, 0.99, 1 - 1e-16)
            for momentum in (0.0, 0.9, 0.9999)
        ]
    if kind in (Adam, Lion, Yogi):
        betas = [(0.9, 0.999), (0.9, 0.0), (0.999, 0.0), (0.0, 0.0)]
        eps = {} if kind is Lion else {"eps": least_eps(kind)}
        return [
            {"lr": lr, "weight_decay": decay, "beta1": one, "beta2": two} | eps
            for lr, decay in DECAYS
            for one, two in betas
        ]
    sums = [{}] if kind is SGD else [{"momentum": m, "nesterov": n} for m, n in SUMS]
    return [{"lr": lr, "weight_decay": decay} | more for lr, decay in DECAYS for more in sums]


def test_every_optimiser_of_ours_is_tried_here() -> None:
    """AdamW is Adam with another default; those of matrices are in `test_matrices.py`."""
    tried = {"sgd", "momentum", "adagrad", "adam", "lion", "rmsprop", "yogi"}
    tried |= {"delayed-nesterov"}
    of_matrices = {"muon", "soap", "shampoo", "lmo", "isotropic"}
    assert registry.BUILT_IN["optimizers"].keys() == tried | {"adamw"} | of_matrices


@EVERY_KIND
def test_pushes_at_all_limits_leave_everything_finite_wherever_the_weights_begin(kind: Any) -> None:
    """Also where many of them add up: the weights begin at the end of what float32 can hold. A sum
    that a decay of theirs gets into has no room for such; what weights are ever like, it has.
    """
    rng = np.random.default_rng(0)
    for options in options_of(kind):
        is_summed = kind is Momentum and options["weight_decay"] > 0
        starts = STARTS[:3] if is_summed else STARTS
        w = np.array([start for start in starts for _ in PATTERNS], np.float32)
        shard = in_memory(kind(kind.Options(**options)), w)
        for step in range(400):
            signs = [pattern(step, rng) for pattern in PATTERNS.values()]
            g = np.array(signs * len(starts), np.float32) * np.float32(NORM)
            shard.apply(Delta(g))
        for name, array in {"w": shard.w, **shard.slots}.items():
            assert np.isfinite(array).all(), (options, name)


@pytest.mark.parametrize("step", [1.0, 1.9, 3.0, 1e-3, 1e10])
def test_a_sum_of_equal_steps_ends_where_they_are_less_than_half_of_its_last_bit(
    step: float,
) -> None:
    """What all the rest stands on: at 2^25 steps at the latest it stands still, and stays where it
    is beyond that.
    """
    reach = 2.0**25 * step
    for start in (0.4 * reach, 0.9 * reach, reach, 1.7 * reach, LARGEST):
        w = np.array([start, -start], np.float32)
        for _ in range(1000):
            w += np.array([step, -step], np.float32)
        assert np.abs(w).max() <= max(reach, np.float32(start))


def test_the_longest_steps_are_as_long_as_is_said_and_short_enough() -> None:
    """One element, and what is worst for each rule, beginning anew or with the largest state."""
    cases: list[tuple[Any, dict[str, Any], dict[str, float], list[float], float]] = [
        (SGD, {}, {}, [NORM], 1e18),
        (Momentum, {}, {"momentum": 2.0**25 * NORM}, [NORM], 3.4e25),
        (Momentum, {"nesterov": True}, {"momentum": 2.0**25 * NORM}, [NORM], 3.4e25),
        (Adagrad, {"eps": least_eps(Adagrad)}, {}, [2.6e-23], 2.7e13),
        (Adagrad, {"eps": least_eps(Adagrad)}, {}, [3e-23], 1e6),
        (Adam, {"eps": least_eps(Adam), "beta2": 0.0, "beta1": 0.999}, {}, [NORM, 0.0], 1e30),
        (Adam, {"eps": least_eps(Adam)}, {}, [NORM, 0.0], 1e6),
        (Lion, {}, {}, [NORM], 1e6),
        (RMSprop, RMSPROP_WORST, {"momentum": 2.0**25 * 1e8}, [NORM], 3.4e21),
        (Yogi, {"eps": least_eps(Yogi)}, {"mean": NORM, "square": 0.0}, [0.0], 1e30),
    ]
    for kind, options, slots, gradients, most in cases:
        shard = in_memory(kind(kind.Options(lr=LR, **options)), np.zeros(1, np.float32))
        for name, value in slots.items():
            shard.slots[name][:] = value
        longest = 0.0
        for g in gradients:
            before = float(shard.w[0])
            shard.apply(Delta(np.array([g], np.float32)))
            longest = max(longest, abs(float(shard.w[0]) - before))
        assert 0.3 * most <= longest <= 1.01 * most, (kind, options, longest)
        assert longest < STEP_MAX


def test_squares_of_pushes_add_up_to_what_float32_can_hold() -> None:
    assert 2.0**25 * NORM**2 < LARGEST
    shard = in_memory(Adagrad(Adagrad.Options()), np.zeros(1, np.float32))
    shard.slots["sum"][:] = 2.0**25 * NORM**2
    shard.apply(Delta(np.array([NORM], np.float32)))
    assert shard.slots["sum"][0] == np.float32(2.0**25 * NORM**2)


@pytest.mark.parametrize(("decay", "grows"), [(1.0, False), (1.9, False), (2.5, True)])
@pytest.mark.parametrize("kind", [SGD, Momentum, Adam, Lion, Yogi])
def test_a_decay_of_more_than_twice_a_weight_makes_it_grow_without_bound(
    kind: Any, decay: float, grows: bool
) -> None:
    """And there is a margin to it: `numeric_limits.DECAY_MAX` is half of that."""
    more = {"momentum": 0.0} if kind is Momentum else {}
    shard = in_memory(kind(kind.Options(lr=0.5, weight_decay=2 * decay, **more)), f32(1.0))
    for _ in range(100):
        shard.apply(Delta(f32(0.0)))
    assert (abs(shard.w[0]) > 1e15) == grows


def test_a_decay_that_takes_all_of_a_weight_is_the_most_that_is_allowed() -> None:
    assert numeric_limits.decay_fault(0.1, 10.0) == ""
    assert numeric_limits.decay_fault(1e6, 0.0) == ""
    assert numeric_limits.decay_fault(0.1, 30.0) == (
        "lr * weight_decay must be <= 1, or weights grow without bound (got 0.1 * 30)"
    )


@pytest.mark.parametrize("other", [0.1, 0.15, 0.3, 1.0, 7.0, 1234.0, 1e6])
def test_what_is_said_to_be_the_most_is_allowed_and_nearly_the_most(other: float) -> None:
    most = float(numeric_limits.most_with(other))
    assert numeric_limits.decay_fault(most, other) == ""
    assert numeric_limits.decay_fault(most * 1.02, other) != ""


def test_the_servers_limit_is_the_one_that_this_is_about() -> None:
    assert get_type_hints(Servers, include_extras=True)["push_norm_max"] == numeric_limits.PushNorm


def f32(*numbers: float) -> Any:
    return np.array(numbers, np.float32)
