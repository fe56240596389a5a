"""What a shorter format cannot express stays behind, exactly."""

import numpy as np
import pytest
import torch
from update_loops import loops as loops

from dlctl.compress.none import Dense
from dlctl.compress.values import take_values


def test_float32_takes_all_of_float32():
    u = np.array([1.5, -2.0, 1e-40], np.float32)
    assert take_values(u, "float32").tolist() == [1.5, -2.0, np.float32(1e-40)]
    assert not u.any()


def test_float32_leaves_what_it_cannot_express_of_float64():
    u = np.array([0.1])
    taken = take_values(u, "float32")
    assert taken.dtype == np.float32
    assert u[0] == 0.1 - float(np.float32(0.1)) != 0


def test_float16_leaves_its_rounding_error():
    u = np.array([1 + 2**-12, 3.0], np.float32)
    assert take_values(u, "float16").tolist() == [1.0, 3.0]
    assert u.tolist() == [2**-12, 0.0]


def test_too_large_for_float16_saturates_and_the_rest_waits():
    u = np.array([70000.0, -1e6, 65519.0], np.float32)
    assert take_values(u, "float16").tolist() == [65504.0, -65504.0, 65504.0]
    assert u.tolist() == [4496.0, -934496.0, 15.0]


def test_a_value_too_large_to_show_a_difference_waits_as_a_whole():
    u = np.array([1e30, 2.0**29 + 64, 3.0], np.float32)
    before = u.astype(np.float64)
    taken = take_values(u, "float16")
    assert taken.tolist() == [0.0, 65472.0, 3.0]
    assert np.array_equal(taken.astype(np.float64) + u, before)


def test_too_large_for_float32_saturates_and_the_rest_waits():
    u = np.array([1e39, -1.7976931348623157e308])
    taken = take_values(u, "float32").astype(np.float64)
    assert taken[0] == float(np.finfo(np.float32).max)
    assert u[0] + taken[0] == 1e39
    assert u[1] + taken[1] == -1.7976931348623157e308


def test_saturation_is_the_same_for_a_tensor():
    u = torch.tensor([70000.0, 1.0, float("inf"), float("nan")])
    taken = take_values(u, "float16")
    assert taken[:3].tolist() == [65504.0, 1.0, float("inf")]
    assert np.isnan(taken[3])
    assert u.tolist() == [4496.0, 0.0, 0.0, 0.0]


def test_dense_values_arrive_without_a_copy_as_float32_and_with_one_as_float16():
    for values, shared in (("float32", True), ("float16", False)):
        u = np.arange(8, dtype=np.float32)
        packed = Dense(Dense.Options(values=values)).take(u)
        delta = Dense.expand(packed, 8)
        assert delta.indices is None
        assert delta.values.tolist() == list(range(8))
        assert np.shares_memory(delta.values, packed.arrays[0]) is shared


@pytest.mark.parametrize(("values", "bytes_per_entry"), [("float32", 4), ("float16", 2)])
def test_dense_costs_the_bytes_of_its_values_and_nothing_else(values, bytes_per_entry):
    packed = Dense(Dense.Options(values=values)).take(np.ones(1000, np.float32))
    assert packed.nbytes == 1000 * bytes_per_entry
