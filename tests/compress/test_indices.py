"""Packed positions: small, exact, and safe to decode from a stranger."""

import tracemalloc
from math import lgamma, log

import numpy as np
import pytest
from example_counts import times
from hypothesis import given
from hypothesis import strategies as st
from update_loops import loops as loops

from dlctl.compress.indices import pack, packed_bytes_max, unpack
from dlctl.errors import RemoteProtocolError

with_many_examples = times(2)


def bernoulli(size, density, seed=0):
    return np.flatnonzero(np.random.default_rng(seed).random(size) < density)


def octets(*numbers):
    return np.array(numbers, np.uint8)


@pytest.mark.parametrize(
    ("size", "indices"),
    [
        (0, []),
        (1, []),
        (1, [0]),
        (2, []),
        (2, [0]),
        (2, [1]),
        (2, [0, 1]),
        (9, [0]),
        (9, [8]),
        (1000, []),
        (1000, [0, 999]),
        (1000, list(range(1000))),
        (1000, list(range(0, 1000, 2))),
        (1000, list(range(1, 1000, 2))),
        (1000, [*range(999)]),
        (1000, [*range(1, 1000)]),
        (1000, list(range(500, 510))),
        (2**40, [0, 1, 2**39, 2**40 - 1]),
        (2**62, [2**62 - 1]),
    ],
)
def test_indices_come_back_as_they_were(size, indices):
    packed = pack(np.array(indices, np.int64), size)
    assert packed.dtype == np.uint8
    found = unpack(packed, len(indices), size)
    assert found.dtype == np.int64
    assert found.tolist() == indices


@with_many_examples
@given(st.data())
def test_any_set_of_indices_comes_back(data):
    size = data.draw(st.one_of(st.integers(0, 300), st.integers(0, 2**50)))
    chosen = data.draw(st.sets(st.integers(0, size - 1), max_size=60)) if size else set()
    comes_back(np.array(sorted(chosen), np.int64), size)


@with_many_examples
@given(st.data(), st.integers(1, 120))
def test_any_part_of_a_small_shard_comes_back(data, size):
    """Of every density: those of more than one half are written as what is left out."""
    flags = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    comes_back(np.flatnonzero(flags), size)


@pytest.mark.parametrize("count", [1, 7, 900, 50_000, 200_000, 400_000, 499_999])
def test_clusters_come_back_wherever_they_are(count):
    size = 500_000
    whole = np.arange(count)
    halves = np.concatenate([whole[: count // 2], whole[count // 2 :] + size - count])
    for indices in (whole, whole + size - count, whole + (size - count) // 2, halves):
        comes_back(indices, size)


def comes_back(indices, size):
    packed = pack(indices, size)
    assert packed.size <= packed_bytes_max(indices.size, size)
    assert np.array_equal(unpack(packed, indices.size, size), indices)


def test_the_example_of_the_documentation_is_true():
    # 3 4 7 13 of 16: gaps 3 0 2 5, one low bit each (1 0 0 1), then the bits 1 2 4 7.
    packed = pack(np.array([3, 4, 7, 13]), 16)
    assert packed.tolist() == [0b1001, 0b1001_0110]


def test_at_a_half_it_is_a_bitmask_and_above_one_of_what_is_left_out():
    assert pack(np.array([0, 2, 3, 6]), 8).tolist() == [0b0100_1101]
    assert pack(np.array([1, 4, 5, 7, 8]), 9).tolist() == [0b0100_1101]


DENSITIES = [
    *(0.0001, 0.001, 0.01, 0.05, 0.1, 0.16, 0.2, 0.25, 0.29, 0.35),
    *(0.38, 0.385, 0.5, 0.62, 0.75, 0.9, 0.99, 0.9999),
]


@pytest.mark.parametrize("density", DENSITIES)
def test_at_every_density_it_is_close_to_the_entropy(density):
    size = 200_000
    indices = bernoulli(size, density)
    assert pack(indices, size).size <= 1.05 * entropy_bytes(indices.size, size) + 4


def entropy_bytes(count, size):
    """The logarithm of the number of sets of `count` of `size` elements."""
    nats = lgamma(size + 1) - lgamma(count + 1) - lgamma(size - count + 1)
    return nats / log(2) / 8


@pytest.mark.parametrize(
    ("density", "bytes_per_entry"), [(0.5, 0.26), (0.1, 0.6), (0.01, 1.02), (0.001, 1.45)]
)
def test_an_index_takes_about_one_byte(density, bytes_per_entry):
    indices = bernoulli(500_000, density)
    assert pack(indices, 500_000).size <= bytes_per_entry * indices.size


def test_what_is_dense_takes_no_more_than_what_is_sparse():
    sparse = bernoulli(100_000, 0.03)
    dense = np.setdiff1d(np.arange(100_000), sparse)
    assert np.array_equal(pack(dense, 100_000), pack(sparse, 100_000))


def test_the_worst_set_takes_little_more_than_a_bitmask_and_no_more_than_plain_numbers():
    for size in (8, 100, 1000, 70_000):
        for count in range(1, size, max(1, size // 300)):
            worst = packed_bytes_max(count, size)
            assert worst <= 1.08 * size / 8 + 2
            assert worst <= count * 4


def test_the_bound_is_reached_by_sets_of_the_widest_gaps():
    size, low_bits = 10_001, 6
    gaps = np.full(100, 64)
    indices = np.cumsum(gaps + 1) - 1
    indices[-1] = size - 1
    assert pack(indices, size).size == packed_bytes_max(100, size) == 100 * low_bits // 8 + 32


# ---------------------------------------------------------------- a hostile sender


def refused(packed, count, size, saying):
    with pytest.raises(RemoteProtocolError, match=saying):
        unpack(packed, count, size)


def test_a_wrong_number_of_bytes_is_refused():
    size, indices = 10_000, bernoulli(10_000, 0.01)
    packed, count = pack(indices, size), indices.size
    too_many = packed_bytes_max(count, size) + 1 - packed.size
    refused(packed[:-1], count, size, "mark")
    refused(packed[1:], count, size, "positions")
    refused(packed[: count * 7 // 8], count, size, "bytes")
    refused(np.append(packed, octets(0)), count, size, "without any")
    refused(np.append(packed, np.ones(too_many, np.uint8)), count, size, "bytes")
    refused(octets(1), 0, size, "bytes")
    refused(octets(0), size, size, "bytes")


def test_more_indices_than_elements_are_refused():
    refused(octets(255), 9, 8, "9 positions in a shard of 8")
    refused(octets(), 1, 0, "1 positions in a shard of 0")


def test_a_mask_with_too_few_or_too_many_bits_is_refused():
    refused(octets(0b0001_0101), 4, 8, "mark 3 elements")
    refused(octets(0b1111_0001), 4, 8, "mark 5 elements")
    refused(octets(0b1001, 0b1001_0010), 4, 16, "mark 3 elements")
    refused(octets(0b0001_0101), 5, 9, "mark 3 elements")


def test_a_mask_that_goes_on_behind_its_last_bit_is_refused():
    refused(octets(0b1111, 0), 4, 10, "without any")
    refused(octets(0b1001, 0b0000_1111, 0), 4, 17, "without any")


def test_bits_behind_the_end_of_the_low_parts_are_refused():
    assert unpack(octets(0b1001, 0b1001_0110), 4, 16).tolist() == [3, 4, 7, 13]
    for bit in (0x10, 0x20, 0x40, 0x80):
        refused(octets(0b1001 | bit, 0b1001_0110), 4, 16, "behind their low parts")


def test_a_bit_behind_the_end_of_the_shard_is_refused():
    refused(octets(0b0010_0001), 2, 5, "gaps that are wider")
    refused(octets(0b0010_0001), 3, 5, "gaps that are wider")


def test_gaps_that_are_wider_than_the_shard_are_refused_before_they_are_added_up():
    # Two of 2^60: 56 low bits each, and together at most 15 times 2^56; then 16, 15, 14 times.
    low = [255] * 14
    refused(octets(*low, 1, 0, 0b10), 2, 2**60, "gaps that are wider")
    refused(octets(*low, 1, 0, 0b01), 2, 2**60, "within the shard")
    assert unpack(octets(*low, 1, 0b1000_0000), 2, 2**60).tolist() == [2**56 - 1, 2**60 - 1]


def test_an_index_outside_of_the_shard_is_refused():
    # As in the example, but the last gap is 9 instead of 5: 17 of 17 elements, then 16.
    assert unpack(octets(0b0001, 0b0001_0110, 0b10), 4, 17).tolist() == [3, 4, 7, 16]
    refused(octets(0b1001, 0b0001_0110, 0b10), 4, 17, "within the shard")


def test_positions_that_are_not_bytes_are_refused():
    refused(np.zeros(1, np.int64), 1, 8, "int64")
    refused(np.zeros((1, 1), np.uint8), 1, 8, "bytes")


@with_many_examples
@given(st.data(), st.sets(st.integers(0, 299), max_size=200), st.integers(300, 400))
def test_one_changed_byte_is_refused_or_another_set(data, chosen, size):
    packed = pack(np.array(sorted(chosen), np.int64), size)
    if packed.size:
        packed[data.draw(st.integers(0, packed.size - 1))] ^= data.draw(st.integers(1, 255))
    valid_or_refused(packed, len(chosen), size)


@with_many_examples
@given(st.binary(max_size=64), st.integers(0, 80), st.integers(0, 2**40))
def test_random_bytes_are_refused_or_valid(data, count, size):
    valid_or_refused(np.frombuffer(data, np.uint8), count, size)


@with_many_examples
@given(st.data(), st.integers(1, 60), st.integers(1, 5000))
def test_random_bytes_of_a_length_that_may_be_are_refused_or_valid(data, count, size):
    if count > size:
        return
    content = data.draw(st.binary(max_size=packed_bytes_max(count, size)))
    valid_or_refused(np.frombuffer(content, np.uint8), count, size)


def valid_or_refused(packed, count, size):
    """What is accepted is what `pack` would have made, to the last bit."""
    try:
        found = unpack(packed, count, size)
    except RemoteProtocolError:
        return
    assert found.size == count
    assert np.all(np.diff(found) > 0)
    assert count == 0 or (found[0] >= 0 and found[-1] < size)
    assert np.array_equal(pack(found, size), packed)


def test_a_lie_about_the_number_of_entries_allocates_nothing():
    tracemalloc.start()
    for count, size in ((2**40, 2**41), (2**31, 2**31), (2**40, 2**40 + 1), (1, 2**62)):
        refused(octets(1, *[2] * 70), count, size, "bytes")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


def test_what_is_refused_of_a_dense_set_is_refused_before_the_rest_is_made_of_it():
    tracemalloc.start()
    size = 2**40
    left_out = pack(np.array([size - 1]), size)
    refused(left_out, size - 6, size - 5, "within the shard")
    refused(left_out[:-1], size - 1, size, "bytes")
    refused(np.append(left_out[:-1], octets(0)), size - 1, size, "mark 0")
    refused(np.append(left_out[:-1], octets(128)), size - 1, size, "gaps that are wider")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000
