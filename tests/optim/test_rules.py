"""The rules in numbers small enough to follow by hand, and what a sparse push means to each."""

import numpy as np
import pytest

from dlctl.compress.base import Delta
from dlctl.optim.adagrad import Adagrad
from dlctl.optim.adam import Adam
from dlctl.optim.momentum import Momentum
from dlctl.optim.sgd import SGD


def f32(*numbers):
    return np.array(numbers, np.float32)


def at(indices, *values):
    return Delta(f32(*values), np.array(indices, np.int64))


def test_sgd_subtracts_the_rate_times_the_gradient():
    w = f32(1, 2, 3)
    SGD(SGD.Options(lr=0.5), 3).apply(w, Delta(f32(2, 0, -4)))
    assert w.tolist() == [0, 2, 5]


def test_sgd_decays_only_what_a_sparse_push_touches():
    w = f32(8, 8, 8)
    SGD(SGD.Options(lr=0.5, weight_decay=0.25), 3).apply(w, at([1], 2))
    assert w.tolist() == [8, 6, 8]


def test_momentum_goes_on_in_the_direction_of_earlier_gradients():
    w, optimizer = f32(0), Momentum(Momentum.Options(lr=1.0, momentum=0.5), 1)
    positions = []
    for g in (4, 0, 0):
        optimizer.apply(w, Delta(f32(g)))
        positions.append(w[0])
    assert positions == [-4, -6, -7]


def test_nesterov_looks_one_decayed_step_ahead():
    w, optimizer = f32(0), Momentum(Momentum.Options(lr=1.0, momentum=0.5, nesterov=True), 1)
    positions = []
    for g in (4, 0, 0):
        optimizer.apply(w, Delta(f32(g)))
        positions.append(w[0])
    assert positions == [-6, -7, -7.5]


def test_momentum_of_untouched_elements_waits_without_decaying():
    w, optimizer = f32(0, 0), Momentum(Momentum.Options(lr=1.0, momentum=0.5), 2)
    optimizer.apply(w, Delta(f32(4, 4)))
    optimizer.apply(w, at([1], 0))
    assert optimizer.slots["momentum"].tolist() == [4, 2]
    assert w.tolist() == [-4, -6]


def test_adagrads_first_step_is_the_rate_whatever_the_gradient():
    w = f32(0, 0, 0, 0)
    Adagrad(Adagrad.Options(lr=0.25), 4).apply(w, Delta(f32(1e-6, -1000, 3, 0)))
    np.testing.assert_allclose(w, [-0.25, 0.25, -0.25, 0], rtol=2e-4)


def test_an_initial_accumulator_tames_adagrads_first_step():
    w, optimizer = f32(0), Adagrad(Adagrad.Options(lr=1.0, initial_accumulator=16.0), 1)
    optimizer.apply(w, Delta(f32(3)))
    np.testing.assert_allclose(w, [-3 / 5])


def test_adagrads_sum_includes_the_current_gradient_and_never_decays():
    w, optimizer = f32(0), Adagrad(Adagrad.Options(lr=1.0), 1)
    for g in (3, 4, 12):
        optimizer.apply(w, Delta(f32(g)))
    assert optimizer.slots["sum"].tolist() == [169]
    np.testing.assert_allclose(w, [-(1 + 4 / 5 + 12 / 13)])


def test_to_adagrad_two_gradients_in_one_push_are_one_gradient():
    one, two = Adagrad(Adagrad.Options(), 1), Adagrad(Adagrad.Options(), 1)
    one.apply(f32(0), Delta(f32(6)))
    two.apply(f32(0), Delta(f32(3)))
    two.apply(f32(0), Delta(f32(3)))
    assert one.slots["sum"][0] == 36
    assert two.slots["sum"][0] == 18


def test_adams_first_step_is_about_the_rate_whatever_the_gradient():
    w = f32(0, 0, 0)
    Adam(Adam.Options(lr=0.5), 3).apply(w, Delta(f32(1e-3, -1000, 0)))
    np.testing.assert_allclose(w, [-0.5, 0.5, 0], rtol=1e-4)


def test_adams_decay_shrinks_w_and_enters_no_slot():
    plain, decayed = Adam(Adam.Options(lr=0.5), 1), Adam(Adam.Options(lr=0.5, weight_decay=0.5), 1)
    a, b = f32(16), f32(16)
    plain.apply(a, Delta(f32(0)))
    decayed.apply(b, Delta(f32(0)))
    assert a.tolist() == [16]
    assert b.tolist() == [12]
    assert not decayed.slots["mean"].any()
    assert not decayed.slots["square"].any()


def test_adam_counts_every_update_dense_or_sparse():
    optimizer = Adam(Adam.Options(), 3)
    w = f32(0, 0, 0)
    optimizer.apply(w, Delta(f32(1, 1, 1)))
    optimizer.apply(w, at([2], 1))
    assert optimizer.counters == {"updates": 2}


@pytest.mark.parametrize("kind", [SGD, Adagrad])
def test_a_sparse_push_equals_a_dense_push_with_zeros_elsewhere(kind):
    # True of the rules for which a gradient of zero changes nothing; momentum and Adam are not.
    rng = np.random.default_rng(0)
    size = 300
    a, b = np.ones(size, np.float32), np.ones(size, np.float32)
    dense, sparse = kind(kind.Options(), size), kind(kind.Options(), size)
    for _ in range(20):
        where = np.flatnonzero(rng.random(size) < 0.1)
        g = np.zeros(size, np.float32)
        g[where] = rng.standard_normal(where.size)
        dense.apply(a, Delta(g))
        sparse.apply(b, Delta(g[where], where))
    assert np.array_equal(a, b)
    for name, slot in dense.slots.items():
        assert np.array_equal(slot, sparse.slots[name])


@pytest.mark.parametrize("kind", [SGD, Momentum, Adagrad, Adam])
def test_every_rule_walks_down_a_bowl(kind):
    w = f32(3, -2, 1, 0.5)
    start = np.linalg.norm(w)
    optimizer = kind(kind.Options(lr=0.1), 4)
    for _ in range(300):
        optimizer.apply(w, Delta(w.copy()))
    assert np.linalg.norm(w) < 0.2 * start
