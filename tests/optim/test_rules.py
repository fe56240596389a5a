"""The rules in numbers small enough to follow by hand, and what a sparse push means to each."""

import numpy as np
import pytest
from update_loops import loops as loops

from dlctl.compress.base import Delta
from dlctl.optim.adagrad import Adagrad
from dlctl.optim.adam import Adam
from dlctl.optim.lion import Lion
from dlctl.optim.momentum import Momentum
from dlctl.optim.rmsprop import RMSprop
from dlctl.optim.sgd import SGD
from dlctl.optim.yogi import Yogi
from dlctl.shards.memory import in_memory


def f32(*numbers):
    return np.array(numbers, np.float32)


def at(indices, *values):
    return Delta(f32(*values), np.array(indices, np.int64))


def test_sgd_subtracts_the_rate_times_the_gradient():
    w = f32(1, 2, 3)
    in_memory(SGD(SGD.Options(lr=0.5)), w).apply(Delta(f32(2, 0, -4)))
    assert w.tolist() == [0, 2, 5]


def test_sgd_decays_only_what_a_sparse_push_touches():
    w = f32(8, 8, 8)
    in_memory(SGD(SGD.Options(lr=0.5, weight_decay=0.25)), w).apply(at([1], 2))
    assert w.tolist() == [8, 6, 8]


def test_momentum_goes_on_in_the_direction_of_earlier_gradients():
    w = f32(0)
    shard = in_memory(Momentum(Momentum.Options(lr=1.0, momentum=0.5)), w)
    positions = []
    for g in (4, 0, 0):
        shard.apply(Delta(f32(g)))
        positions.append(w[0])
    assert positions == [-4, -6, -7]


def test_nesterov_looks_one_decayed_step_ahead():
    w = f32(0)
    shard = in_memory(Momentum(Momentum.Options(lr=1.0, momentum=0.5, nesterov=True)), w)
    positions = []
    for g in (4, 0, 0):
        shard.apply(Delta(f32(g)))
        positions.append(w[0])
    assert positions == [-6, -7, -7.5]


def test_momentum_of_untouched_elements_waits_without_decaying():
    w = f32(0, 0)
    shard = in_memory(Momentum(Momentum.Options(lr=1.0, momentum=0.5)), w)
    shard.apply(Delta(f32(4, 4)))
    shard.apply(at([1], 0))
    assert shard.slots["momentum"].tolist() == [4, 2]
    assert w.tolist() == [-4, -6]


def test_adagrads_first_step_is_the_rate_whatever_the_gradient():
    w = f32(0, 0, 0, 0)
    in_memory(Adagrad(Adagrad.Options(lr=0.25)), w).apply(Delta(f32(1e-6, -1000, 3, 0)))
    np.testing.assert_allclose(w, [-0.25, 0.25, -0.25, 0], rtol=2e-4)


def test_an_initial_accumulator_tames_adagrads_first_step():
    w = f32(0)
    shard = in_memory(Adagrad(Adagrad.Options(lr=1.0, initial_accumulator=16.0)), w)
    shard.apply(Delta(f32(3)))
    np.testing.assert_allclose(w, [-3 / 5])


def test_adagrads_sum_includes_the_current_gradient_and_never_decays():
    w = f32(0)
    shard = in_memory(Adagrad(Adagrad.Options(lr=1.0)), w)
    for g in (3, 4, 12):
        shard.apply(Delta(f32(g)))
    assert shard.slots["sum"].tolist() == [169]
    np.testing.assert_allclose(w, [-(1 + 4 / 5 + 12 / 13)])


def test_to_adagrad_two_gradients_in_one_push_are_one_gradient():
    one, two = (in_memory(Adagrad(Adagrad.Options()), f32(0)) for _ in range(2))
    one.apply(Delta(f32(6)))
    two.apply(Delta(f32(3)))
    two.apply(Delta(f32(3)))
    assert one.slots["sum"][0] == 36
    assert two.slots["sum"][0] == 18


def test_adams_first_step_is_about_the_rate_whatever_the_gradient():
    w = f32(0, 0, 0)
    in_memory(Adam(Adam.Options(lr=0.5)), w).apply(Delta(f32(1e-3, -1000, 0)))
    np.testing.assert_allclose(w, [-0.5, 0.5, 0], rtol=1e-4)


def test_adams_decay_shrinks_w_and_enters_no_slot():
    plain = in_memory(Adam(Adam.Options(lr=0.5)), f32(16))
    decayed = in_memory(Adam(Adam.Options(lr=0.5, weight_decay=0.5)), f32(16))
    for shard in (plain, decayed):
        shard.apply(Delta(f32(0)))
    assert plain.w.tolist() == [16]
    assert decayed.w.tolist() == [12]
    assert not decayed.slots["mean"].any()
    assert not decayed.slots["square"].any()


def test_adam_counts_every_update_dense_or_sparse():
    shard = in_memory(Adam(Adam.Options()), f32(0, 0, 0))
    shard.apply(Delta(f32(1, 1, 1)))
    shard.apply(at([2], 1))
    assert shard.optimizer.counters == {"updates": 2}


def test_rmsprop_divides_by_the_root_of_a_mean_that_forgets():
    w = f32(0)
    shard = in_memory(RMSprop(RMSprop.Options(lr=1.0, alpha=0.75)), w)
    positions = []
    for g in (4, 0, 4):
        shard.apply(Delta(f32(g)))
        positions.append(w[0])
    assert shard.slots["square"].tolist() == [0.75 * 0.75 * 4 + 4]
    np.testing.assert_allclose(positions, [-2, -2, -2 - 4 / 2.5])


def test_rmsprops_momentum_sums_what_is_divided_already_and_waits_where_nothing_is_pushed():
    w = f32(0, 0)
    shard = in_memory(RMSprop(RMSprop.Options(lr=1.0, alpha=0.75, momentum=0.5)), w)
    shard.apply(Delta(f32(4, 4)))
    shard.apply(at([1], 0))
    assert shard.slots["momentum"].tolist() == [2, 1]
    assert w.tolist() == [-2, -3]


@pytest.mark.parametrize("kind", [SGD, Adagrad])
def test_a_sparse_push_equals_a_dense_push_with_zeros_elsewhere(kind):
    # True of the rules for which a gradient of zero changes nothing; momentum and Adam are not.
    rng = np.random.default_rng(0)
    size = 300
    dense, sparse = (in_memory(kind(kind.Options()), np.ones(size, np.float32)) for _ in range(2))
    for _ in range(20):
        where = np.flatnonzero(rng.random(size) < 0.1)
        g = np.zeros(size, np.float32)
        g[where] = rng.standard_normal(where.size)
        dense.apply(Delta(g))
        sparse.apply(Delta(g[where], where))
    assert np.array_equal(dense.w, sparse.w)
    for name, slot in dense.slots.items():
        assert np.array_equal(slot, sparse.slots[name])


@pytest.mark.parametrize("kind", [SGD, Momentum, Adagrad, Adam, Lion, RMSprop, Yogi])
def test_every_rule_walks_down_a_bowl(kind):
    w = f32(3, -2, 1, 0.5)
    start = np.linalg.norm(w)
    shard = in_memory(kind(kind.Options(lr=0.1)), w)
    for _ in range(300):
        shard.apply(Delta(w.copy()))
    assert np.linalg.norm(w) < 0.2 * start
