"""TopK takes exactly the k largest elements, whatever the vector looks like."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from dlctl.compress.sampled import SampledTopK
from dlctl.compress.topk import TopK
from dlctl.model.vector import largest


def topk(density, values="float32", dense_below=0):
    return TopK(TopK.Options(density=density, values=values, dense_below=dense_below))


def gaussian(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize(
    ("density", "size", "k"), [(0.01, 1000, 10), (0.01, 50, 1), (0.5, 7, 3), (1.0, 9, 9)]
)
def test_k_is_the_density_of_the_size_rounded_down_and_at_least_one(density, size, k):
    packed = topk(density).take(gaussian(size))
    assert packed.arrays[0].size == k


def test_the_elements_taken_are_those_of_largest_magnitude_with_their_sign():
    u = np.array([0.1, -9.0, 2.0, 0.0, -3.0, 8.0, 1.0, 0.5], np.float32)
    packed = topk(0.5).take(u)
    delta = TopK.expand(packed, 8)
    assert delta.indices.tolist() == [1, 2, 4, 5]
    assert delta.values.tolist() == [-9.0, 2.0, -3.0, 8.0]
    assert u.tolist() == [np.float32(0.1), 0, 0, 0, 0, 0, 1.0, 0.5]


def test_zeros_are_not_sent_even_if_k_has_room_for_them():
    u = np.zeros(100, np.float32)
    u[[7, 70]] = 1, -2
    assert TopK.expand(topk(0.5).take(u), 100).indices.tolist() == [7, 70]


def test_what_float16_rounds_to_zero_is_not_sent_and_waits():
    u = np.full(10, 1e-8, np.float32)
    packed = topk(0.5, "float16").take(u)
    assert packed.nbytes == 0
    assert np.all(u == np.float32(1e-8))


def test_of_equal_elements_exactly_k_are_taken():
    u = np.tile(np.array([1, -1, 0.5, 2], np.float32), 100)
    packed = topk(0.5).take(u)
    delta = TopK.expand(packed, 400)
    assert delta.values.size == 200
    assert np.sort(np.abs(delta.values)).tolist() == [1.0] * 100 + [2.0] * 100
    assert np.count_nonzero(np.abs(u) == 1) == 100


def test_on_torch_of_equal_elements_exactly_k_are_taken():
    u = torch.ones(400)
    packed = topk(0.1).take(u)
    assert packed.arrays[0].size == 40
    assert int(u.sum()) == 360


def test_the_density_may_change_between_any_two_pushes():
    compressor = topk(0.01)
    assert compressor.take(gaussian(1000)).arrays[0].size == 10
    compressor.density = 0.2
    assert compressor.take(gaussian(1000)).arrays[0].size == 200


@pytest.mark.parametrize("as_vector", [np.array, torch.tensor])
def test_without_feedback_the_same_elements_travel_and_nothing_stays(as_vector):
    values = gaussian(2000)
    u, kept = as_vector(values), as_vector(values)
    sent = TopK(TopK.Options(dense_below=0, feedback=False)).take(u)
    with_feedback = TopK(TopK.Options(dense_below=0)).take(kept)
    for one, other in zip(sent.arrays, with_feedback.arrays, strict=True):
        assert np.array_equal(one, other)
    assert not u.any()
    assert kept.any()


@pytest.mark.parametrize("as_vector", [np.array, torch.tensor])
def test_a_slice_that_is_too_small_to_compress_travels_whole_and_nothing_of_it_waits(as_vector):
    least = TopK.Options().dense_below
    assert least == SampledTopK.Options().dense_below == 1024
    for size, is_whole in ((1, True), (least - 1, True), (least, False)):
        values = gaussian(size)
        u = as_vector(values)
        packed = topk(0.01, "float16", least).take(u)
        delta = TopK.expand(packed, size)
        if is_whole:
            assert delta.indices is None
            assert np.array_equal(delta.values, values)
            assert not u.any()
        else:
            assert delta.values.size == delta.indices.size == int(0.01 * size)
            assert u.any()


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", ["normal", "uniform", "constant", "heavy-tailed", "one large"])
def test_what_stays_is_at_most_the_part_of_the_squared_norm_that_the_theory_allows(density, shape):
    rng = np.random.default_rng(3)
    d = 2000
    u = {
        "normal": rng.standard_normal(d),
        "uniform": rng.uniform(-1, 1, d),
        "constant": np.full(d, -0.25),
        "heavy-tailed": rng.standard_cauchy(d),
        "one large": np.eye(1, d, 5)[0] * 100 + 0.01,
    }[shape]
    u = u.astype(np.float32).astype(np.float64)  # so that only the selection leaves something
    whole = u @ u
    k = topk(density).take(u).arrays[0].size
    assert u @ u <= (1 - k / d) * whole * (1 + 1e-12)


def test_what_stays_of_a_bell_shaped_vector_is_less_than_the_square_of_that_part():
    # Shi et al. 2019 for bell-shaped gradients: (1 - k/d)^2 instead of 1 - k/d.
    d = 5000
    for seed in range(5):
        for density in (0.01, 0.1, 0.3):
            u = gaussian(d, seed).astype(np.float64)
            whole = u @ u
            k = topk(density).take(u).arrays[0].size
            assert u @ u <= (1 - k / d) ** 2 * whole


@pytest.mark.parametrize(("values", "bytes_per_entry"), [("float32", 5.1), ("float16", 3.1)])
def test_one_percent_of_the_entries_travel_in_little_more_than_one_percent_of_the_bytes(
    values, bytes_per_entry
):
    packed = topk(0.01, values).take(gaussian(200_000))
    assert packed.nbytes <= 2000 * bytes_per_entry


def test_nan_counts_as_the_largest_on_numpy_and_torch():
    for make in (np.array, torch.tensor):
        u = make([1.0, float("inf"), -5.0, float("nan"), 2.0])
        assert list(map(int, largest(u, 2))) == [1, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_selection_is_the_one_that_sorting_gives(dtype):
    rng = np.random.default_rng(5)
    for size in (1, 2, 3, 10, 1000):
        for zeros in (0.0, 0.5, 0.99):
            u = rng.standard_normal(size).astype(dtype)
            u[rng.random(size) < zeros] = 0
            for k in {1, size // 2, size} - {0}:
                found = largest(u, k)
                assert found.dtype == np.int64
                expected = np.sort(np.argsort(-np.abs(u), kind="stable")[:k])
                expected = expected[u[expected] != 0]
                assert np.array_equal(found, expected)
                tensor = largest(torch.from_numpy(u), k).numpy()
                assert np.array_equal(tensor[u[tensor] != 0], expected)


def test_the_first_of_several_equal_elements_are_selected_from_a_numpy_vector():
    assert largest(np.array([1.0, 2.0, 1.0, -1.0, 1.0]), 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        '{"dense_below": -1}',
        '{"density": 0.0}',
        '{"density": 1.01}',
        '{"density": -1}',
        '{"values": "int4"}',
    ],
)
def test_a_density_outside_of_its_range_is_refused_with_the_job_file(wrong):
    with pytest.raises(ValidationError):
        TypeAdapter(TopK.Options).validate_json(wrong)
