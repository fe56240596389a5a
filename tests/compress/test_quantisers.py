"""randomk, int8, onebit, powersgd and bfloat16: the sentences of their papers, and their bytes."""

import numpy as np
import pytest
import torch

from dlctl.compress import bfloat16
from dlctl.compress.int8 import Int8, scales_of
from dlctl.compress.none import Dense
from dlctl.compress.onebit import OneBit
from dlctl.compress.powersgd import PowerSGD, orthogonalise, shape
from dlctl.compress.randomk import RandomK, draw
from dlctl.errors import RemoteProtocolError
from dlctl.wire.messages import Packed

D = 10_000


def gaussian(size=D, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def sent_by(compressor, u):
    """float64[n] as it arrives."""
    delta = compressor.expand(compressor.take(u), u.size)
    full = np.zeros(u.size)
    full[slice(None) if delta.indices is None else delta.indices] = delta.values
    return full


# ---------------------------------------------------------------- randomk


def test_every_element_is_drawn_with_the_same_probability():
    count, size, draws = 30, 300, 3000
    often = np.zeros(size)
    for seed in range(draws):
        often[draw(seed, count, size)] += 1
    expected = draws * count / size
    assert np.abs(often - expected).max() <= 5 * np.sqrt(expected)


def test_a_seed_means_the_same_positions_for_ever():
    # What a seed means may never change: server and worker need not have the same numpy.
    assert draw(0, 5, 50).tolist() == [9, 18, 29, 36, 43]
    assert draw(2**64 - 1, 4, 1_000_003).tolist() == [101442, 293897, 697340, 863153]


@pytest.mark.parametrize(("count", "size"), [(0, 5), (1, 1), (7, 7), (3, 10), (999, 1000)])
def test_positions_are_strictly_increasing_and_within_the_shard(count, size):
    for seed in range(20):
        found = draw(seed, count, size)
        assert found.size == count
        assert np.all(np.diff(found) > 0)
        assert not count or (found[0] >= 0 and found[-1] < size)


def test_the_error_of_randomk_is_the_part_of_the_squared_norm_that_is_not_sent():
    compressor = RandomK(RandomK.Options(density=0.1, dense_below=0))
    u = gaussian().astype(np.float64)
    parts = []
    for _ in range(50):
        rest = u.copy()
        compressor.take(rest)
        parts.append((rest @ rest) / (u @ u))
    assert np.mean(parts) == pytest.approx(0.9, abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("density", [0.1, 0.6])  # of 500; k = 300 makes strata of 2 and of 1
def test_unbiased_pushes_are_right_on_average_and_leave_nothing(density):
    compressor = RandomK(RandomK.Options(density=density, unbiased=True, dense_below=0))
    u = gaussian(500)
    total = np.zeros(500)
    for _ in range(4000):
        rest = u.copy()
        total += sent_by(compressor, rest)
        assert not rest.any()
    assert np.abs(total / 4000 - u).max() <= 6 * np.abs(u).max() * 3 / np.sqrt(4000)


def test_randomk_sends_no_positions():
    assert RandomK(RandomK.Options(density=0.01)).take(gaussian()).nbytes == 100 * 4 + 16


# ---------------------------------------------------------------- int8


def test_an_int8_is_off_by_half_a_scale_at_most():
    u = gaussian() * np.repeat(10.0 ** np.arange(10), 1000).astype(np.float32)
    before = u.copy()
    packed = Int8(Int8.Options()).take(u)
    scales = np.repeat(packed.arrays[1], 1024)[:D]
    assert np.all(np.abs(u) <= scales / 2)
    largest = np.maximum.reduceat(np.abs(before), np.arange(0, D, 1024))
    assert np.all(packed.arrays[1] <= largest / 127 * (1 + 1 / 128)), "a scale for each block"
    assert packed.nbytes == D + 4 * 10


def test_a_scale_has_eight_bits_and_reaches_the_largest_element():
    largest = np.abs(gaussian(1000)) * 10.0 ** np.random.default_rng(1).integers(-20, 15, 1000)
    scales = scales_of(largest).astype(np.float64)
    mantissa, _ = np.frexp(scales)
    assert np.all(mantissa * 256 == np.round(mantissa * 256))
    assert np.all(scales * 127 >= largest)


def test_stochastic_rounding_is_right_on_average_and_nearest_is_not():
    u = np.full(2048, 0.3, np.float32)
    u[::1024] = 127
    errors = {}
    for rounding in ("nearest", "stochastic"):
        compressor = Int8(Int8.Options(rounding=rounding))
        pushes = [sent_by(compressor, u.copy())[1:1024].mean() for _ in range(100)]
        errors[rounding] = abs(np.mean(pushes) - 0.3)
    assert errors["nearest"] == pytest.approx(0.3)
    assert errors["stochastic"] < 0.01


# ---------------------------------------------------------------- onebit


def test_one_bit_rebuilds_each_block_from_the_means_of_its_signs():
    u = gaussian(1024 + 500)
    before = u.copy()
    taken = sent_by(OneBit(OneBit.Options()), u)
    for block in (slice(0, 1024), slice(1024, None)):
        positive = before[block] >= 0
        assert taken[block][positive] == pytest.approx(before[block][positive].mean(), rel=1e-5)
        assert taken[block][~positive] == pytest.approx(before[block][~positive].mean(), rel=1e-5)


def test_the_error_of_the_scaled_sign_is_that_of_the_paper_and_two_means_are_not_worse():
    u = gaussian(1024) + np.float32(0.4)
    left = {}
    for means in ("one", "two"):
        rest = u.copy()
        OneBit(OneBit.Options(means=means)).take(rest)
        left[means] = float(rest @ rest) / float(u @ u)
    expected = 1 - np.abs(u).sum() ** 2 / (1024 * float(u @ u))
    assert left["one"] == pytest.approx(expected, rel=1e-4)
    assert left["two"] <= left["one"]


def test_one_bit_takes_a_little_more_than_one_bit():
    assert OneBit(OneBit.Options()).take(gaussian()).nbytes == D // 8 + 2 * 4 * 10


# ---------------------------------------------------------------- powersgd


def low_rank(rank, height=90, width=90, seed=0):
    rng = np.random.default_rng(seed)
    M = rng.standard_normal((height, rank)) @ rng.standard_normal((rank, width))
    return M.astype(np.float32).reshape(-1)


def test_a_matrix_of_the_rank_of_its_factors_travels_as_a_whole():
    u = low_rank(2)
    norm = np.linalg.norm(u)
    packed = PowerSGD(PowerSGD.Options(rank=2)).take(u)
    assert np.linalg.norm(u) <= 1e-5 * norm
    assert packed.nbytes == 4 * 2 * (90 + 90) + 1


def test_what_stays_is_never_longer_than_what_was_there():
    for size in (1024, 5000, 9999):
        u = gaussian(size)
        before = np.linalg.norm(u)
        PowerSGD(PowerSGD.Options(rank=4)).take(u)
        assert np.linalg.norm(u) <= before


def test_starting_where_the_last_push_ended_finds_the_largest_directions():
    rng = np.random.default_rng(1)
    left, right = (np.linalg.qr(rng.standard_normal((90, 90)))[0] for _ in range(2))
    u = ((left * 0.93 ** np.arange(90)) @ right).astype(np.float32).reshape(-1)
    best = np.sqrt(sum(0.93 ** (2 * i) for i in range(2, 90)))
    compressor, errors = PowerSGD(PowerSGD.Options(rank=2)), []
    for _ in range(40):
        rest = u.copy()
        compressor.take(rest)
        errors.append(np.linalg.norm(rest) / best)
    assert errors[0] > 1.02
    assert errors[-1] < 1.005


def errors_of_pushes(u, pushes=6):
    """What every push leaves, of one and the same vector each time; relative to its length."""
    compressor, errors = PowerSGD(PowerSGD.Options(rank=2)), []
    for _ in range(pushes):
        rest = u.copy()
        compressor.take(rest)
        errors.append(np.linalg.norm(rest.astype(float)) / np.linalg.norm(u.astype(float)))
    return errors


@pytest.mark.parametrize("norm", [1e-15, 1e-11, 1e10, 1e17])
def test_a_very_short_or_long_vector_is_approximated_as_well_as_any_other(norm):
    u = gaussian(5000) / np.float32(np.linalg.norm(gaussian(5000)))
    assert errors_of_pushes(u * np.float32(norm)) == pytest.approx(errors_of_pushes(u), rel=1e-4)


def test_a_push_of_nothing_does_not_forget_what_the_one_before_it_found():
    ours, theirs = PowerSGD(PowerSGD.Options()), PowerSGD(PowerSGD.Options())
    for seed in range(3):
        one, other = ours.take(gaussian(seed=seed)), theirs.take(gaussian(seed=seed))
        ours.take(np.zeros(D, np.float32))
        assert [a.tobytes() for a in one.arrays] == [a.tobytes() for a in other.arrays]


def test_factors_that_no_sender_makes_because_they_are_larger_than_the_shard_are_refused():
    height, width = shape(4096)
    for rank in (32, 64):
        factors = np.ones(height * rank, np.float32), np.ones(width * rank, np.float32)
        push = Packed("powersgd", 4096, (np.array([rank], np.uint8), *factors))
        with pytest.raises(RemoteProtocolError):
            PowerSGD.expand(push, 4096)


def test_columns_become_orthonormal_or_zero():
    P = np.random.default_rng(2).standard_normal((50, 4))
    P[:, 2] = P[:, 0] - 3 * P[:, 1]
    orthogonalise(P)
    assert np.allclose(P.T @ P, np.diag([1, 1, 0, 1]), atol=1e-12)


# ---------------------------------------------------------------- bfloat16


def test_bfloat16_is_rounded_as_torch_does_it():
    rng = np.random.default_rng(3)
    u = rng.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    ours = bfloat16.decode(bfloat16.encode(u))
    theirs = torch.from_numpy(u).bfloat16().float().numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_dense_bfloat16_halves_the_bytes_and_keeps_the_rest():
    u = np.array([1 + 2**-10, -3e38, 3.0], np.float32)
    packed = Dense(Dense.Options(values="bfloat16")).take(u)
    assert packed.nbytes == 6
    assert Dense.expand(packed, 3).values[[0, 2]].tolist() == [1.0, 3.0]
    assert u[[0, 2]].tolist() == [2**-10, 0.0]


def test_too_large_for_bfloat16_saturates_and_the_rest_waits():
    largest = float(np.finfo(np.float32).max)
    u = np.array([largest, 1.0], np.float32)
    packed = Dense(Dense.Options(values="bfloat16")).take(u)
    taken = Dense.expand(packed, 2).values.astype(np.float64)
    assert np.isfinite(taken).all()
    assert taken[0] + float(u[0]) == largest
