"""The cut of a model into shards: whole matrices stay whole, loads follow the weights."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from example_counts import times
from hypothesis import given
from hypothesis import strategies as st

from dlctl.errors import UsageError
from dlctl.model.cut import Unit, cut, fits
from dlctl.model.flat import slice_bounds

UNITS = st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=12).map(
    lambda sizes: [Unit(f"t{n}", size, whole) for n, (size, whole) in enumerate(sizes)]
)
WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


def size_of(units):
    return sum(unit.size for unit in units)


@times(4)
@given(st.integers(0, 10_000), st.integers(1, 40), st.floats(1e-3, 1e3))
def test_equal_weights_without_matrices_are_slices_of_equal_length(size, servers, weight):
    bounds = cut([Unit("a", size // 3), Unit("b", size - size // 3)], [weight] * servers)
    assert list(pairwise(bounds)) == [slice_bounds(size, servers, k) for k in range(servers)]


@times(4)
@given(st.integers(1, 10_000), WEIGHTS)
def test_without_matrices_each_load_is_its_share_but_for_one_element(size, weights):
    bounds = cut([Unit("a", size)], weights)
    shares = [size * weight / sum(weights) for weight in weights]
    loads = [hi - lo for lo, hi in pairwise(bounds)]
    assert all(abs(load - share) < 1.001 for load, share in zip(loads, shares, strict=True))


@times(8)
@given(UNITS, WEIGHTS)
def test_no_matrix_is_divided_and_no_load_exceeds_its_share_by_more_than_one(units, weights):
    atoms = sum(unit.size if not unit.is_whole else 1 for unit in units if unit.size)
    has_matrix = any(unit.is_whole and unit.size > 1 for unit in units)
    if has_matrix and atoms < len(weights):
        with pytest.raises(UsageError, match=next(u.name for u in units if u.size)):
            cut(units, weights)
        return
    bounds = cut(units, weights)
    assert fits(bounds, len(weights), size_of(units))
    at = 0
    for unit in units:
        divided = any(at < bound < at + unit.size for bound in bounds)
        assert not (unit.is_whole and divided), unit
        at += unit.size
    largest = max((unit.size for unit in units if unit.is_whole), default=1)
    for (lo, hi), weight in zip(pairwise(bounds), weights, strict=True):
        assert hi - lo <= size_of(units) * weight / sum(weights) + max(1, largest) + 1e-6
        assert not has_matrix or lo < hi


@times(6)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=9), st.integers(1, 4))
def test_the_largest_load_is_as_small_as_among_all_cuts(sizes, servers):
    servers = min(servers, len(sizes))
    units = [Unit(f"m{n}", size, True) for n, size in enumerate(sizes)]
    bounds = cut(units, [1.0] * servers)
    best = min(
        max(sum(sizes[lo:hi]) for lo, hi in pairwise((0, *where, len(sizes))))
        for where in combinations(range(1, len(sizes)), servers - 1)
    )
    found = max(hi - lo for lo, hi in pairwise(bounds))
    assert found == best or max(sizes) == 1


@times(20)
@given(UNITS, st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.5]), min_size=1, max_size=6))
def test_who_has_no_weight_has_nothing_and_the_others_are_cut_as_without_it(units, weights):
    positive = [weight for weight in weights if weight]
    parts = sum(unit.size if not unit.is_whole else 1 for unit in units if unit.size)
    if not positive or parts < len(positive):
        return
    bounds = cut(units, weights)
    loads = [hi - lo for lo, hi in pairwise(bounds)]
    alone = [hi - lo for lo, hi in pairwise(cut(units, positive))]
    assert [load for load, weight in zip(loads, weights, strict=True) if weight] == alone
    assert not any(load for load, weight in zip(loads, weights, strict=True) if not weight)
    assert fits(bounds, len(weights), size_of(units))


def test_weights_count():
    units = [Unit(f"m{n}", 10, True) for n in range(10)]
    assert cut(units, [1.0, 4.0]) == (0, 20, 100)
    assert cut([Unit("embedding", 100)], [1.0, 4.0]) == (0, 20, 100)


def test_more_servers_than_tensors_are_refused_by_name():
    units = [Unit("0.weight", 600, True), Unit("1.weight", 40, True), Unit("1.bias", 1)]
    assert cut(units, [1.0] * 3) == (0, 600, 640, 641)
    with pytest.raises(UsageError, match=r"0\.weight, 1\.weight, 1\.bias") as refused:
        cut(units, [1.0] * 4)
    assert "count = 3" in refused.value.hint


@pytest.mark.parametrize("bounds", [(), (0,), (0, 4), (1, 5), (0, 3, 2, 5), (0, 2, 5, 5)])
def test_bounds_of_another_model_do_not_fit(bounds):
    assert not fits(bounds, 2, 5)
    assert fits((0, 2, 5), 2, 5)
