"""What torch has not: the papers' formulas as plain loops over single elements, in float64."""

import math

import numpy as np
import pytest
import torch
from update_loops import loops as loops

from dlctl.compress.base import Delta
from dlctl.optim.delayed_nesterov import DelayedNesterov
from dlctl.optim.lion import Lion
from dlctl.optim.yogi import Yogi
from dlctl.shards.memory import in_memory

SIZE, STEPS = 40, 60


def sign(x):
    return math.copysign(1.0, x) if x else 0.0


def lion(w, gradients, lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0):
    """Chen et al. 2023, Algorithm 2, of one element; None: it was not pushed."""
    m = 0.0
    for g in gradients:
        if g is None:
            continue
        c = beta1 * m + (1 - beta1) * g
        w = w - lr * (sign(c) + weight_decay * w)
        m = beta2 * m + (1 - beta2) * g
    return w, {"mean": m}


def yogi(w, gradients, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-3, initial_accumulator=1e-6):
    """Zaheer et al. 2018, Algorithm 2, of one element; None: it was not pushed."""
    m, v = 0.0, initial_accumulator
    for g in gradients:
        if g is None:
            continue
        m = beta1 * m + (1 - beta1) * g
        v = v - (1 - beta2) * sign(v - g * g) * g * g
        w = w - lr * m / (math.sqrt(v) + eps)
    return w, {"mean": m, "square": v}


def delayed_nesterov(w, gradients, lr=0.7, momentum=0.9, every=4, spread=0.0):
    """Liu et al. 2024, Algorithm 3, of one element; None: it was not pushed, which is a push of 0,
    as the N-th is made of all."""
    m = arrived = 0.0
    for number, g in enumerate(gradients, 1):
        g = g or 0.0
        arrived += g
        if number % every:
            w = w - lr * (spread * momentum * m + g / every)
            continue
        m = momentum * m + arrived / every
        w = w - lr * ((1 - spread * every + spread) * momentum * m + g / every)
        arrived = 0.0
    return w, {"momentum": m, "arrived": arrived}


CASES = {
    "delayed nesterov": (DelayedNesterov, delayed_nesterov, {"lr": 0.05, "every": 4}),
    "delayed nesterov, spread": (
        DelayedNesterov,
        delayed_nesterov,
        {"lr": 0.05, "momentum": 0.8, "every": 5, "spread": 0.1},
    ),
    "lion": (Lion, lion, {}),
    "lion with its own betas": (Lion, lion, {"lr": 0.02, "beta1": 0.5, "beta2": 0.8}),
    "lion with decay": (Lion, lion, {"lr": 0.02, "weight_decay": 0.3}),
    "yogi": (Yogi, yogi, {}),
    "yogi with options of its own": (
        Yogi,
        yogi,
        {"lr": 0.02, "beta1": 0.5, "beta2": 0.9, "eps": 1e-5, "initial_accumulator": 2.0},
    ),
}


@pytest.mark.parametrize("part", [1.0, 0.2], ids=["dense", "sparse"])
@pytest.mark.parametrize("case", CASES)
def test_sixty_pushes_end_where_the_paper_s_loop_ends(case, part):
    kind, paper, options = CASES[case]
    rng = np.random.default_rng(0)
    start = rng.standard_normal(SIZE).astype(np.float32)
    gradients = rng.standard_normal((STEPS, SIZE)) * 10 ** rng.uniform(-2, 2, SIZE)
    gradients = (gradients + (np.arange(STEPS) > 40)[:, None] * 0.5).astype(np.float32)
    is_pushed = rng.random((STEPS, SIZE)) < part
    shard = in_memory(kind(kind.Options(**options)), start.copy())
    for g, pushed in zip(gradients, is_pushed, strict=True):
        where = np.flatnonzero(pushed)
        shard.apply(Delta(g) if part == 1 else Delta(g[where], where))
    for at in range(SIZE):
        mine = [
            float(g) if p else None for g, p in zip(gradients[:, at], is_pushed[:, at], strict=True)
        ]
        w, slots = paper(float(start[at]), mine, **options)
        assert shard.w[at] == pytest.approx(w, rel=2e-5, abs=2e-6)
        assert shard.slots.keys() == slots.keys()
        for name, value in slots.items():
            assert shard.slots[name][at] == pytest.approx(value, rel=2e-5, abs=1e-4)


def test_lions_first_steps_are_the_rate_whatever_the_gradient():
    shard = in_memory(Lion(Lion.Options(lr=0.5)), np.zeros(3, np.float32))
    shard.apply(Delta(np.array([1e-30, -1e12, 0], np.float32)))
    assert shard.w.tolist() == [-0.5, 0.5, 0]


def test_yogi_forgets_a_large_gradient_more_slowly_than_it_learns_of_it():
    shard = in_memory(Yogi(Yogi.Options(beta2=0.9, initial_accumulator=0.0)), np.zeros(1, "f4"))
    squares = []
    for g in (10, 1, 1):
        shard.apply(Delta(np.array([g], np.float32)))
        squares.append(float(shard.slots["square"][0]))
    np.testing.assert_allclose(squares, [10, 9.9, 9.8], rtol=1e-6)


def test_equal_pushes_of_all_replicas_are_one_step_of_nesterovs_momentum():
    """As torch makes it, of which there is one for as many pushes as there are replicas."""
    rng, every = np.random.default_rng(5), 3
    w = rng.standard_normal(SIZE).astype(np.float32)
    theta = torch.nn.Parameter(torch.from_numpy(w.copy()))
    torchs = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    options = DelayedNesterov.Options(lr=0.7, momentum=0.9, every=every)
    shard = in_memory(DelayedNesterov(options), w)
    for _ in range(20):
        g = rng.standard_normal(SIZE).astype(np.float32)
        for _ in range(every):
            shard.apply(Delta(g))
        theta.grad = torch.from_numpy(g)
        torchs.step()
    np.testing.assert_allclose(shard.w, theta.detach().numpy(), rtol=1e-4, atol=1e-5)
