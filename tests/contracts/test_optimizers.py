"""What every server optimiser in the registry must do; a new name gets all of these tests."""

import json
import tracemalloc

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from update_loops import loops as loops

from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.shards.memory import in_memory
from dlctl.util.keydocs import keys
from dlctl.util.threads import BLOCK

NAMES = registry.names("optimizers")
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(registry.load("optimizers", n), id=n) for n in NAMES]
)
SIZE = 100


def vector(seed, size=SIZE):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def some_indices(seed, size=SIZE, part=0.2):
    chosen = np.flatnonzero(np.random.default_rng(seed).random(size) < part)
    return chosen.astype(np.int64)


def pushes(seed, count, size=SIZE):
    """Dense and sparse pushes in turn."""
    for i in range(count):
        g = vector(seed + i, size)
        if i % 3 == 1:
            where = some_indices(seed + i, size)
            yield Delta(g[where], where)
        else:
            yield Delta(g)


def shard_of(kind, w, **options):
    """A shard around `w`, with this optimiser's default options but for some."""
    if "every" in kind.Options.__dataclass_fields__:
        options = {"every": 4} | options  # By itself each of its updates is of all elements.
    return in_memory(kind(kind.Options(**options)), w)


def frozen(delta):
    """As it comes from the wire: nothing may be written."""
    for array in delta:
        if array is not None:
            array.flags.writeable = False
    return delta


@every_kind
def test_a_dense_push_moves_every_element_against_its_gradient(kind):
    w, g = vector(0), vector(1)
    before = w.copy()
    shard_of(kind, w).apply(Delta(g))
    assert np.all(np.sign(before - w) == np.sign(g))


@every_kind
def test_a_sparse_push_touches_its_elements_and_no_others(kind):
    w = vector(0)
    shard = shard_of(kind, w)
    shard.apply(Delta(vector(1)))
    before = {"w": w.copy(), **{k: v.copy() for k, v in shard.slots.items()}}
    where = some_indices(2)
    shard.apply(Delta(vector(3)[where], where))
    others = np.setdiff1d(np.arange(SIZE), where)
    for name, array in {"w": w, **shard.slots}.items():
        assert np.array_equal(array[others], before[name][others]), name
    changed = [
        name
        for name in before
        if np.all({"w": w, **shard.slots}[name][where] != before[name][where])
    ]
    assert "w" in changed
    assert len(changed) > bool(shard.slots)


@every_kind
def test_a_sparse_push_of_all_elements_is_the_dense_push(kind):
    a, b = vector(0), vector(0)
    one, other = shard_of(kind, a), shard_of(kind, b)
    for i in range(5):
        g = vector(10 + i)
        one.apply(Delta(g))
        other.apply(Delta(g, np.arange(SIZE)))
    assert np.array_equal(a, b)
    for name, slot in one.slots.items():
        assert np.array_equal(slot, other.slots[name])


@every_kind
def test_an_empty_push_changes_no_element(kind):
    w = vector(0)
    before = w.copy()
    shard_of(kind, w).apply(Delta(np.empty(0, np.float32), np.empty(0, np.int64)))
    assert np.array_equal(w, before)


@pytest.mark.per_commit("kind")
@every_kind
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17])
def test_the_cut_into_blocks_does_not_show(kind, size):
    # Two shards of half the size give, bit for bit, what one shard gives.
    whole, halves = vector(0, size), vector(0, size)
    cut = size // 2
    bounds = [(0, cut), (cut, size)]
    one = shard_of(kind, whole)
    two = [shard_of(kind, halves[lo:hi]) for lo, hi in bounds]
    for i in range(3):
        g = vector(20 + i, size)
        where = some_indices(i, size, 0.7)
        one.apply(Delta(g) if i != 1 else Delta(g[where], where))
        for half, (lo, hi) in zip(two, bounds, strict=True):
            mine = where[(where >= lo) & (where < hi)]
            delta = Delta(g[lo:hi]) if i != 1 else Delta(g[mine], mine - lo)
            half.apply(delta)
    assert np.array_equal(whole, halves)


@every_kind
def test_everything_happens_in_place_and_keeps_its_dtype_and_size(kind):
    w = vector(0)
    shard = shard_of(kind, w)
    arrays = {"w": w, **shard.slots}
    addresses = {name: array.ctypes.data for name, array in arrays.items()}
    for delta in pushes(1, 6):
        shard.apply(delta)
    for name, array in {"w": w, **shard.slots}.items():
        assert array.ctypes.data == addresses[name]
        assert array.dtype == np.float32
        assert array.shape == (SIZE,)


@every_kind
def test_a_push_from_the_wire_is_read_only_and_stays_as_it_is(kind):
    w = vector(0)
    shard = shard_of(kind, w)
    for delta in pushes(1, 6):
        shard.apply(frozen(delta))


@every_kind
def test_a_push_of_the_wrong_length_is_never_broadcast(kind):
    w = vector(0)
    shard = shard_of(kind, w)
    for length in (1, SIZE - 1, SIZE + 1):
        with pytest.raises(AssertionError):
            shard.apply(Delta(np.ones(length, np.float32)))
        with pytest.raises(AssertionError):
            shard.apply(Delta(np.ones(length, np.float32), np.arange(2)))
    assert np.array_equal(w, vector(0))


@every_kind
def test_slots_and_counters_are_the_whole_state(kind):
    w = vector(0)
    first = shard_of(kind, w)
    for delta in pushes(1, 8):
        first.apply(delta)

    saved_w = w.copy()
    saved_slots = {name: slot.copy() for name, slot in first.slots.items()}
    saved_counters = json.dumps(first.optimizer.counters)
    second = shard_of(kind, saved_w)
    second.storage.fill(saved_slots, None)
    second.optimizer.counters = json.loads(saved_counters)

    for delta in pushes(50, 8):
        first.apply(delta)
        second.apply(delta)
    assert np.array_equal(w, saved_w)
    assert first.optimizer.counters == second.optimizer.counters
    assert first.slots.keys() == second.slots.keys()


@every_kind
def test_every_slot_has_a_number_that_its_elements_begin_with(kind):
    optimizer = kind(kind.Options())
    assert all(np.isfinite(first) for first in optimizer.slots.values())
    assert "w" not in optimizer.slots
    for name, slot in in_memory(optimizer, vector(0, 77)).slots.items():
        assert slot.dtype == np.float32
        assert slot.tolist() == [np.float32(optimizer.slots[name])] * 77


@every_kind
def test_the_rate_may_change_between_any_two_updates(kind):
    a, b = vector(0), vector(0)
    slow, fast = shard_of(kind, a), shard_of(kind, b)
    slow.apply(Delta(vector(1)))
    fast.apply(Delta(vector(1)))
    start = a.copy()
    fast.optimizer.lr = 10 * slow.optimizer.lr
    slow.apply(Delta(vector(2)))
    fast.apply(Delta(vector(2)))
    np.testing.assert_allclose(start - b, 10 * (start - a), rtol=1e-3, atol=5e-6)


@every_kind
def test_no_vector_of_the_shards_size_is_allocated(kind):
    size = 32 * BLOCK
    w, g = vector(0, size), vector(1, size)
    shard = shard_of(kind, w)
    peaks = []
    for _ in range(4):  # A thread keeps its scratch, which it makes with its first part.
        tracemalloc.start()
        shard.apply(Delta(g))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks) < BLOCK


@every_kind
def test_a_gradient_of_zero_moves_nothing_even_at_first(kind):
    w = vector(0)
    before = w.copy()
    has_decay = "weight_decay" in kind.Options.__dataclass_fields__
    shard = shard_of(kind, w, **({"weight_decay": 0.0} if has_decay else {}))
    shard.apply(Delta(np.zeros(SIZE, np.float32)))
    assert np.array_equal(w, before)


# ---------------------------------------------------------------- options


@every_kind
def test_options_have_a_positive_rate_and_refuse_what_they_do_not_know(kind):
    validator = TypeAdapter(kind.Options)
    assert validator.validate_json("{}").lr > 0
    assert validator.validate_json('{"lr": 1}').lr == 1
    for wrong in ('{"lr": 0.0}', '{"lr": -0.1}', '{"lr": 1e9}', '{"lr": "0.1"}', '{"nosuch": 1}'):
        with pytest.raises(ValidationError):
            validator.validate_json(wrong)


@every_kind
def test_every_option_has_its_manual_text_below_it(kind):
    assert [key.name for key in keys(kind.Options) if not key.text] == []
