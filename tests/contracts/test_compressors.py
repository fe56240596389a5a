"""What every compressor in the registry must do; a new name gets all of these tests."""

import inspect
import itertools
import math
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from example_counts import times
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import TypeAdapter, ValidationError

from dlctl import registry
from dlctl.compress.plain import expand, nothing
from dlctl.errors import RemoteProtocolError
from dlctl.wire import codec
from dlctl.wire.messages import Packed, Push

NAMES = registry.names("compressors")
EDGES = {
    "nothing": [],
    "one element": [3.0],
    "one zero": [0.0],
    "all zeros": [0.0] * 50,
    "signed zeros": [-0.0, 0.0] * 10,
    "two": [-1.0, 1.0],
    "ties": [1.0, -1.0] * 40,
    "denormals": [1e-45, -3e-42, 1e-39, 5e-8, -6e-8] * 7,
    "larger than any float16": [65504.0, 65519.9, 65520.0, -1e5, 1e8, 6e8, -1e12, 3.4e38] * 3,
    "one large among zeros": [0.0] * 300 + [-7.5] + [0.0] * 99,
}


def variants(name):
    """Every combination of those options that are a choice of words, and with small slices both
    whole and compressed.
    """
    options = registry.load("compressors", name).Options
    hints = get_type_hints(options)
    choices = {k: get_args(h) for k, h in hints.items() if get_origin(h) is Literal}
    if "dense_below" in hints:
        yield {"dense_below": options().dense_below}
        choices["dense_below"] = (0,)
        usual = ("float32", "float16", getattr(options(), "values", ""))
        choices["values"] = tuple(dict.fromkeys(usual)) if "values" in hints else ()
        choices = {key: chosen for key, chosen in choices.items() if chosen}
    for chosen in itertools.product(*choices.values()):
        yield dict(zip(choices, chosen, strict=True))


CASES = [
    pytest.param((name, options), id="-".join([name, *map(str, options.values())]))
    for name in NAMES
    for options in variants(name)
]
COMPRESSING = [case for case in CASES if not case.values[0][1].get("dense_below")]
"""Those that do not send a short vector whole."""
every_name = pytest.mark.parametrize("kind", [registry.load("compressors", n) for n in NAMES])
BOTH = (np.float32, np.float64)


def dtypes(test):
    """For every commit each of `CASES` with one of them."""
    return pytest.mark.per_commit("make")(pytest.mark.parametrize("dtype", BOTH)(test))


ROUNDING = ("onebit", "powersgd", "dct")
"""What these send has many bits: the residual is rounded once per push, to the last bit of `u`."""
ROLLING = ("randomk", "powersgd")
"""The generator of `topk-sampled` chooses its sample, which is all of a vector so small."""
STALLS = {"gaussian-ref": "it may select nothing at all, as the published code does"}


class Maker(NamedTuple):
    """New compressors of one kind and one choice of options."""

    name: str
    options: dict

    def __call__(self):
        kind = registry.load("compressors", self.name)
        return kind(kind.Options(**self.options))

    @property
    def is_exact(self):
        """Whether rounding loses nothing of any vector, not even the last bit."""
        stochastic = self.options.get("rounding") == "stochastic"
        is_rounded = self.name in ROUNDING or self.options.get("values") == "2bit"
        return not is_rounded and not stochastic

    @property
    def is_random(self):
        """Whether what a worker sends depends on chance."""
        return self.name in ROLLING or self.options.get("rounding") == "stochastic"


@pytest.fixture(params=CASES, scope="module")
def make(request):
    return Maker(*request.param)


@pytest.fixture(scope="module")
def compressor(make):
    return make()


def dense(compressor, packed):
    """A packed vector in float64, the unsent elements zero; checks all that a Delta promises."""
    size = packed.length
    delta = compressor.expand(packed, size)
    return expanded(delta, size)


def expanded(delta, size):
    assert delta.values.dtype == np.float32
    assert delta.values.ndim == 1
    with np.errstate(invalid="ignore"):  # a signalling NaN of a hostile sender
        values = delta.values.astype(np.float64)
    if delta.indices is None:
        assert values.size == size
        return values
    assert delta.indices.dtype == np.int64
    assert delta.indices.size == delta.values.size <= size
    assert np.all(np.diff(delta.indices) > 0)
    if delta.indices.size:
        assert delta.indices[0] >= 0
        assert delta.indices[-1] < size
    full = np.zeros(size)
    full[delta.indices] = values
    return full


def as_sent(packed):
    """The same after a journey: encoded, decoded, arrays read-only."""
    push = Push(1, 2, 0, 7, 5, 3, 4, 64, 0, packed)
    arrived = codec.decode([bytes(frame) for frame in codec.encode(push)])
    assert all(not array.flags.writeable for array in arrived.delta.arrays)
    return arrived.delta


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, 1, 3000])
def test_a_push_of_nothing_is_of_zeros(name, size):
    kind = registry.load("compressors", name)
    packed = as_sent(nothing(name, size))
    assert packed.nbytes == 0
    assert expanded(expand(kind, packed, size), size).tolist() == [0.0] * size


# ---------------------------------------------------------------- nothing is lost


@dtypes
@pytest.mark.parametrize("kind_of_vector", ["numpy", "torch"])
def test_sent_plus_residual_is_the_sum_of_all_gradients_to_the_last_bit(
    make, dtype, kind_of_vector
):
    # Gradients on a grid of 2^-11, so that the sums of the test itself are exact in float32.
    rng = np.random.default_rng(1)
    compressor = make()
    size = 700
    residual = np.zeros(size, dtype)
    u = torch.from_numpy(residual) if kind_of_vector == "torch" else residual
    added, taken = np.zeros(size), np.zeros(size)
    for _ in range(150):
        gradient = np.round(rng.standard_normal(size) * 4096) / 2048
        added += gradient
        u += torch.from_numpy(gradient) if kind_of_vector == "torch" else gradient
        taken += dense(compressor, compressor.take(u))
    if make.is_exact:
        assert np.array_equal(taken + residual.astype(np.float64), added)
    else:
        rounded_off = 150 * np.finfo(dtype).eps * 20
        assert np.abs(taken + residual - added).max() <= rounded_off
    assert np.any(taken)


@pytest.mark.parametrize("make", COMPRESSING, indirect=True)
@times(0.16)
@given(data=st.data())
def test_every_single_take_is_exact_for_any_finite_vector(make, data):
    compressor = make()
    dtype, width = data.draw(st.sampled_from([(np.float32, 32), (np.float64, 64)]))
    # One number above 1e18 is enough for a vector to travel whole.
    largest = data.draw(st.sampled_from([2.0**50, 2.0**50, float(np.finfo(dtype).max)]))
    elements = st.floats(-largest, largest, width=width)
    u = data.draw(arrays(dtype, st.integers(2, 60), elements=elements))
    before = u.astype(np.float64)
    taken = dense(compressor, compressor.take(u))
    assert_nothing_is_lost(make, before, taken, u)


@dtypes
def test_no_sum_or_product_overflows_whatever_the_length_of_a_vector(make, dtype):
    for length in (1e-30, 1e-15, 0.9e18):
        compressor = make()
        u = np.random.default_rng(12).standard_normal(2000)
        u = (u * (length / np.linalg.norm(u))).astype(dtype)
        for _ in range(3):
            before = u.astype(np.float64)
            taken = dense(compressor, compressor.take(u))
            assert np.all(np.isfinite(taken)), length
            assert_nothing_is_lost(make, before, taken, u)


def assert_nothing_is_lost(make, before, taken, u):
    """What arrives and what stays is what there was: in exact numbers, or else as exactly as the
    vector's own precision can say it.
    """
    assert np.array_equal(u, before.astype(u.dtype) - taken.astype(u.dtype))
    if make.is_exact:
        assert np.array_equal(taken + u, before)
        assert np.array_equal(before - taken, u)


@dtypes
def test_what_waits_is_sent_in_the_end_when_nothing_more_is_added(make, dtype):
    compressor = make()
    u = np.random.default_rng(2).standard_normal(150).astype(dtype)
    start = float(np.linalg.norm(u))
    if make.name in STALLS:
        compressor.density = 0.5  # so that it does select something of this vector
    for _ in range(3000):
        compressor.take(u)
        if np.linalg.norm(u) <= 1e-6 * start:
            return
    raise AssertionError(f"{np.linalg.norm(u) / start} of it still waits")


@dtypes
def test_edge_vectors_pass_and_nothing_of_them_is_lost(make, dtype):
    for edge, values in EDGES.items():
        compressor = make()
        u = np.array(values, dtype)
        before = u.astype(np.float64)
        taken = dense(compressor, as_sent(compressor.take(u)))
        assert np.all(np.isfinite(taken)), edge
        assert_nothing_is_lost(make, before, taken, u)


def test_all_zeros_leave_all_zeros(compressor):
    u = np.zeros(1000, np.float32)
    assert not dense(compressor, compressor.take(u)).any()
    assert not u.any()


@dtypes
def test_poison_is_seen_by_the_receiver_and_does_not_stay_in_the_residual(make, dtype):
    for poison in (math.nan, math.inf, -math.inf):
        compressor = make()
        u = np.random.default_rng(3).standard_normal(200).astype(dtype)
        u[17] = poison
        taken = dense(compressor, as_sent(compressor.take(u)))
        assert np.array_equal(taken[17], poison, equal_nan=True)
        assert np.all(np.isfinite(u)), poison


def test_a_vector_of_nothing_but_nan_neither_hangs_nor_raises(compressor):
    u = np.full(500, np.nan, np.float32)
    assert np.isnan(dense(compressor, compressor.take(u))).any()


# ---------------------------------------------------------------- arrays


def test_a_push_arrives_as_it_was_sent(compressor):
    u = np.random.default_rng(4).standard_normal(3000).astype(np.float32)
    packed = compressor.take(u)
    arrived = as_sent(packed)
    assert arrived.kind == packed.kind
    assert arrived.kind in NAMES
    assert arrived.length == packed.length == 3000
    assert arrived.nbytes == packed.nbytes
    assert np.array_equal(dense(compressor, arrived), dense(compressor, packed))


@pytest.mark.parametrize("kind_of_vector", ["numpy", "torch"])
def test_what_was_taken_shares_no_memory_with_the_vector(make, kind_of_vector):
    for dtype in BOTH:
        host = np.random.default_rng(5).standard_normal(256).astype(dtype)
        u = torch.from_numpy(host) if kind_of_vector == "torch" else host
        packed = make().take(u)
        before = [array.copy() for array in packed.arrays]
        assert not any(np.shares_memory(array, host) for array in packed.arrays), dtype
        u += 1
        for array, kept in zip(packed.arrays, before, strict=True):
            assert np.array_equal(array, kept), dtype


@dtypes
def test_a_torch_tensor_gives_the_same_as_a_numpy_array(make, dtype):
    for size in (0, 1, 2, 999):
        # Values that float32 holds: torch rounds float64 to float16 by way of float32.
        on_host = np.random.default_rng(6).standard_normal(size).astype(np.float32).astype(dtype)
        on_host[::3] = 0
        tensor = torch.from_numpy(on_host.copy())
        one, other = make(), make()
        for _ in range(4):
            ours, theirs = one.take(on_host), other.take(tensor)
            assert [a.dtype for a in ours.arrays] == [a.dtype for a in theirs.arrays]
            for a, b in zip(ours.arrays, theirs.arrays, strict=True):
                assert np.array_equal(a, b), size
            assert np.array_equal(on_host, tensor.numpy()), size


def test_a_slice_of_a_larger_vector_is_taken_without_touching_its_neighbours(make):
    compressor = make()
    whole = np.random.default_rng(7).standard_normal(300).astype(np.float32)
    before = whole.copy()
    packed = compressor.take(whole[100:200])
    assert packed.length == 100
    assert np.array_equal(whole[:100], before[:100])
    assert np.array_equal(whole[200:], before[200:])
    taken = dense(compressor, packed)
    assert_nothing_is_lost(make, before[100:200].astype(np.float64), taken, whole[100:200])


def test_equal_vectors_give_equal_bytes_push_by_push(make):
    u = np.random.default_rng(8).standard_normal(500).astype(np.float32)
    one, other = make(), make()
    for shard in (0, 1, 0):
        once, again = one.take(u.copy(), shard), other.take(u.copy(), shard)
        assert [a.tobytes() for a in once.arrays] == [a.tobytes() for a in again.arrays]


def test_what_a_compressor_keeps_of_one_shard_changes_nothing_of_what_another_gets_exactly(make):
    compressor = make()
    rng = np.random.default_rng(10)
    for round_number in range(6):
        for shard, size in enumerate((300, 300, 77)):
            u = (rng.standard_normal(size) * 10.0 ** (3 * shard - round_number)).astype(np.float32)
            before = u.astype(np.float64)
            taken = dense(compressor, compressor.take(u, shard))
            assert_nothing_is_lost(make, before, taken, u)


def test_a_random_one_has_other_numbers_for_another_worker_and_the_same_for_the_same(make):
    u = np.random.default_rng(11).standard_normal(2000).astype(np.float32)
    pushes = []
    for slot, term in ((0, 1), (0, 1), (1, 1), (0, 2)):
        compressor = make()
        compressor.reseed(5, slot, term)
        pushes.append([a.tobytes() for a in compressor.take(u.copy()).arrays])
    first, same, other, reborn = pushes
    assert first == same
    assert (first != other) == (first != reborn) == (other != reborn) == make.is_random


# ---------------------------------------------------------------- a hostile sender


def refused_or_valid(compressor, packed, size):
    """True if it was refused in the one way that is allowed, False if it is a proper delta."""
    try:
        expanded(compressor.expand(packed, size), size)
    except RemoteProtocolError:
        return True
    return False


wire_arrays = st.sampled_from(codec.DTYPES).flatmap(
    lambda dtype: st.binary(max_size=96).map(
        lambda data: np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
    )
)


@times(0.12)
@given(
    content=st.lists(wire_arrays, max_size=4), length=st.integers(0, 40), size=st.integers(0, 40)
)
def test_random_arrays_are_refused_or_are_a_valid_delta(compressor, content, length, size):
    refused_or_valid(compressor, Packed("x", length, tuple(content)), size)


@times(0.12)
@given(data=st.data())
def test_a_proper_push_with_some_bytes_changed_is_refused_or_a_valid_delta(compressor, data):
    size = data.draw(st.integers(1, 500))
    u = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    packed = compressor.take(u)
    changed = []
    for array in packed.arrays:
        raw = bytearray(array.tobytes())
        for _ in range(data.draw(st.integers(0, 2)) if raw else 0):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        changed.append(np.frombuffer(bytes(raw), array.dtype))
    refused_or_valid(compressor, Packed(packed.kind, size, tuple(changed)), size)


def a_push(compressor):
    u = np.random.default_rng(9).standard_normal(400).astype(np.float32)
    return compressor.take(u)


def test_a_push_for_a_shard_of_another_size_is_refused(compressor):
    packed = a_push(compressor)
    for size in (0, 399, 401, 2**40):
        assert refused_or_valid(compressor, packed, size)
    for length in (0, 399, 401, 2**62):
        assert refused_or_valid(compressor, Packed(packed.kind, length, packed.arrays), 400)


def test_missing_and_additional_arrays_are_refused(compressor):
    packed = a_push(compressor)
    for content in ((), packed.arrays[:-1], (*packed.arrays, packed.arrays[0])):
        assert refused_or_valid(compressor, Packed(packed.kind, 400, content), 400)


def test_arrays_one_element_shorter_or_longer_are_refused(compressor):
    packed = a_push(compressor)
    for i, array in enumerate(packed.arrays):
        for wrong in (array[:-1], np.append(array, array[-1:]), array[:0]):
            content = (*packed.arrays[:i], wrong, *packed.arrays[i + 1 :])
            assert refused_or_valid(compressor, Packed(packed.kind, 400, content), 400)


def test_arrays_of_another_dtype_are_refused(compressor):
    packed = a_push(compressor)
    others = ("<f8", "<i4", "<i8", "<u2", "<u4", ">f4")
    for dtype, (i, array) in itertools.product(others, enumerate(packed.arrays)):
        if dtype == "<u2" and array.dtype in ("<f4", "<f2", "<u2"):
            continue  # It would be values, of bfloat16.
        content = (*packed.arrays[:i], array.astype(dtype), *packed.arrays[i + 1 :])
        assert refused_or_valid(compressor, Packed(packed.kind, 400, content), 400), dtype


# ---------------------------------------------------------------- options


@every_name
def test_options_have_defaults_are_frozen_and_refuse_unknown_keys(kind):
    options = kind.Options()
    for field in kind.Options.__dataclass_fields__:
        with pytest.raises(AttributeError):
            setattr(options, field, None)
    with pytest.raises(ValidationError):
        TypeAdapter(kind.Options).validate_json('{"nosuch": 1}')


@every_name
def test_every_option_has_its_manual_text_below_it(kind):
    assert_every_field_is_documented(kind.Options)


def assert_every_field_is_documented(options):
    for field in options.__dataclass_fields__:
        owner = next(kind for kind in options.__mro__ if field in kind.__annotations__)
        lines = [line.strip() for line in inspect.getsource(owner).splitlines()]
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{field}:")]
        assert lines[at + 1].startswith('"""'), f"{field} has no text under it"
