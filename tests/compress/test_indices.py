"""Packed positions: small, exact, and safe to decode from a stranger."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlctl.compress.indices import pack, packed_bytes, unpack
from dlctl.errors import RemoteProtocolError

seeded = settings(derandomize=True, database=None, deadline=None, max_examples=200)


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
        (9, [0]),
        (9, [8]),
        (1000, []),
        (1000, [0, 999]),
        (1000, list(range(1000))),
        (1000, list(range(0, 1000, 2))),
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


@seeded
@given(st.data())
def test_any_set_of_indices_comes_back(data):
    size = data.draw(st.one_of(st.integers(0, 300), st.integers(0, 2**50)))
    chosen = data.draw(st.sets(st.integers(0, size - 1), max_size=60)) if size else set()
    indices = np.array(sorted(chosen), np.int64)
    packed = pack(indices, size)
    assert packed.size == packed_bytes(indices.size, size)
    assert np.array_equal(unpack(packed, indices.size, size), indices)


def test_the_example_of_the_documentation_is_true():
    # 3 4 7 13 of 40: two low bits each (3 0 3 1), then the bits 0 2 3 6 of the high parts.
    packed = pack(np.array([3, 4, 7, 13]), 40)
    assert packed.tolist() == [0b01_11_00_11, 0b0100_1101, 0]


@pytest.mark.parametrize(
    ("density", "bytes_per_entry"), [(0.5, 0.26), (0.1, 0.68), (0.01, 1.1), (0.001, 1.53)]
)
def test_an_index_takes_about_one_byte(density, bytes_per_entry):
    indices = bernoulli(500_000, density)
    assert pack(indices, 500_000).size <= bytes_per_entry * indices.size


def test_the_size_depends_on_the_number_of_indices_and_not_on_where_they_are():
    spread = np.arange(0, 100_000, 100)
    clustered = np.arange(99_000, 100_000)
    assert pack(spread, 100_000).size == pack(clustered, 100_000).size


def test_it_is_never_larger_than_a_bitmask_or_than_the_plain_numbers():
    for size in (8, 100, 1000, 70_000):
        for count in {1, size // 100, size // 10, size // 2, size} - {0}:
            used = packed_bytes(count, size)
            assert used <= (size + 7) // 8
            assert used <= count * 4


# ---------------------------------------------------------------- a hostile sender


def refused(packed, count, size, saying):
    with pytest.raises(RemoteProtocolError, match=saying):
        unpack(packed, count, size)


def test_a_wrong_number_of_bytes_is_refused():
    packed = pack(bernoulli(10_000, 0.01), 10_000)
    count = bernoulli(10_000, 0.01).size
    refused(packed[:-1], count, 10_000, "bytes")
    refused(np.append(packed, octets(0)), count, 10_000, "bytes")
    refused(octets(1), 0, 10_000, "bytes")


def test_more_indices_than_elements_are_refused():
    refused(octets(255), 9, 8, "9 positions in a shard of 8")
    refused(octets(), 1, 0, "1 positions in a shard of 0")


def test_a_mask_with_too_few_or_too_many_bits_is_refused():
    refused(octets(0b0001_0101), 4, 8, "mark 3 elements")
    refused(octets(0b1111_0001), 4, 8, "mark 5 elements")


def test_a_bit_behind_the_end_of_a_mask_is_refused():
    refused(octets(0b0010_0111), 4, 5, "positions mark")


def test_the_same_index_twice_is_refused():
    # As the example above, but low parts 3 3 and high parts 0 0: the index 3 comes twice.
    refused(octets(0b01_11_11_11, 0b0100_1011, 0), 4, 40, "strictly increasing")


def test_indices_that_go_back_are_refused():
    # Low parts 3 0 in one and the same high part.
    refused(octets(0b01_11_00_11, 0b0100_1011, 0), 4, 40, "strictly increasing")


def test_an_index_outside_of_the_shard_is_refused():
    size = 38  # the last high part is 9, for 36 to 39
    refused(octets(0b10_11_00_11, 0b0000_1101, 0b0001_0000), 4, size, "within the shard")
    inside = unpack(octets(0b01_11_00_11, 0b0000_1101, 0b0001_0000), 4, size)
    assert inside.tolist() == [3, 4, 7, 37]


def test_positions_that_are_not_bytes_are_refused():
    refused(np.zeros(1, np.int64), 1, 8, "int64")
    refused(np.zeros((1, 1), np.uint8), 1, 8, "bytes")


@seeded
@given(st.binary(max_size=64), st.integers(0, 80), st.integers(0, 2**40))
def test_random_bytes_are_refused_or_valid(data, count, size):
    valid_or_refused(np.frombuffer(data, np.uint8), count, size)


@seeded
@given(st.data(), st.integers(1, 60), st.integers(1, 5000))
def test_random_bytes_of_the_right_length_are_refused_or_valid(data, count, size):
    if count > size:
        return
    length = packed_bytes(count, size)
    content = data.draw(st.binary(min_size=length, max_size=length))
    valid_or_refused(np.frombuffer(content, np.uint8), count, size)


def valid_or_refused(packed, count, size):
    try:
        found = unpack(packed, count, size)
    except RemoteProtocolError:
        return
    assert found.size == count
    assert np.all(np.diff(found) > 0)
    assert count == 0 or (found[0] >= 0 and found[-1] < size)


def test_a_lie_about_the_number_of_entries_allocates_nothing():
    tracemalloc.start()
    for count, size in ((2**40, 2**41), (2**31, 2**31), (1, 2**62)):
        refused(octets(1, 2, 3), count, size, "bytes")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000
