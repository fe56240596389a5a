"""What a shard remembers of its newest changes: it is right, or it says that it does not know."""

from __future__ import annotations

import numpy as np
from example_counts import times
from hypothesis import given
from hypothesis import strategies as st

from dlctl.compress import indices
from dlctl.compress.base import Delta
from dlctl.optim.sgd import SGD
from dlctl.roles.worker.received_slice import slice_in
from dlctl.shards.base import Shard
from dlctl.shards.history import PART, VERSIONS_MAX, History
from dlctl.shards.memory import in_memory
from dlctl.wire import messages as m

SIZE = 64
with_many_examples = times(2)


def where(*positions: int) -> np.ndarray:
    return np.array(positions, np.int64)


def new_shard(size: int = SIZE) -> Shard:
    return in_memory(SGD(SGD.Options(lr=1.0)), np.zeros(size, np.float32))


def delta(*positions: int, packed: bool = False) -> Delta:
    found = where(*positions)
    came_as = indices.pack(found, SIZE) if packed else None
    return Delta(np.ones(len(positions), np.float32), found, came_as)


def apply(shard: Shard, *positions: int, packed: bool = False) -> None:
    shard.apply(delta(*positions, packed=packed))


def changed(shard: Shard, base: int) -> list[int] | None:
    """The positions, whose values must be those of the shard."""
    found = shard.changes_since(base)
    if found is None:
        return None
    message = m.SparseParameters(0, 1, 1, shard.version, base, *found)
    arrived = slice_in(message, shard.w.size)
    assert arrived.where is not None
    assert np.array_equal(arrived.values, shard.w[arrived.where])
    return sorted({int(position) for position in arrived.where})


def test_what_several_versions_have_changed_is_all_of_it() -> None:
    shard = new_shard()
    for positions in ((5, 9), (2, 9), (), (1,)):
        apply(shard, *positions)
    assert [changed(shard, base) for base in range(5)] == [
        [1, 2, 5, 9], [1, 2, 9], [1], [1], [],
    ]  # fmt: skip


def test_nothing_is_known_of_a_shard_before_its_first_sparse_update() -> None:
    shard = new_shard()
    assert changed(shard, 0) is None
    assert not shard.history.reaches(0)
    apply(shard, 3)
    assert shard.history.reaches(1)


def test_a_dense_update_makes_all_before_it_unknown() -> None:
    shard = new_shard()
    apply(shard, 3)
    shard.apply(Delta(np.ones(SIZE, np.float32)))
    assert [changed(shard, base) for base in range(3)] == [None, None, None]
    apply(shard, 4)
    assert [changed(shard, base) for base in range(4)] == [None, None, [4], []]


def test_a_version_that_was_not_made_by_an_update_is_never_guessed_at() -> None:
    shard = new_shard()
    apply(shard, 3)
    shard.version += 1
    assert changed(shard, 0) is changed(shard, 1) is changed(shard, 2) is None
    apply(shard, 4)
    assert [changed(shard, base) for base in range(4)] == [None, None, [4], []]


def test_a_version_of_the_future_is_unknown() -> None:
    shard = new_shard()
    apply(shard, 3)
    assert changed(shard, 2) is None


def test_it_remembers_an_eighth_of_the_elements_and_so_many_versions_at_most() -> None:
    shard, eighth = new_shard(), SIZE // 8
    for _ in range(3):
        apply(shard, *range(eighth // 2))
    assert changed(shard, 0) is None
    assert changed(shard, 1) is not None
    apply(shard, *range(eighth + 1))
    assert changed(shard, 3) is None
    assert changed(shard, 4) is None, "so much at once is not remembered at all"
    for _ in range(VERSIONS_MAX + 1):
        apply(shard)
    assert changed(shard, 4) is None
    assert changed(shard, 5) == []


def test_it_costs_nothing_while_updates_are_dense() -> None:
    shard = new_shard()
    apply(shard, 1)
    shard.apply(Delta(np.ones(SIZE, np.float32)))
    assert not shard.history.reaches(2)
    assert vars(shard.history)["_total"] == 0


def test_what_one_push_has_changed_is_sent_on_in_the_form_in_which_it_came() -> None:
    shard, pushed = new_shard(), delta(3, 17, 40, packed=True)
    assert pushed.positions is not None
    shard.apply(pushed)
    found = shard.changes_since(0)
    assert found is not None
    assert np.array_equal(found.positions, pushed.positions)
    assert not np.shares_memory(found.positions, pushed.positions), "that is lent to the shard"
    assert changed(shard, 0) == [3, 17, 40]
    apply(shard, 17, 18, packed=True)
    assert changed(shard, 0) == [3, 17, 18, 40]
    assert changed(shard, 1) == [17, 18]


def test_a_push_of_more_than_is_remembered_is_not_sent_on_either() -> None:
    shard = new_shard()
    apply(shard, *range(SIZE // PART + 1), packed=True)
    assert changed(shard, 0) is None


def test_what_was_sent_does_not_change_with_the_shard() -> None:
    shard = new_shard()
    apply(shard, 3, packed=True)
    before = shard.changes_since(0)
    assert before is not None
    apply(shard, 3, packed=True)
    assert before.values.tolist() == [-1.0]


def test_positions_beyond_four_billion_keep_all_their_bits() -> None:
    assert vars(History(2**32))["_dtype"] == np.uint32
    assert vars(History(2**32 + 1))["_dtype"] == np.int64


@with_many_examples
@given(
    st.lists(
        st.none() | st.just("step") | st.sets(st.integers(0, SIZE - 1), max_size=5), max_size=30
    ),
    st.booleans(),
)
def test_all_that_differs_between_two_versions_is_named(
    updates: list[object], packed: bool
) -> None:
    shard, states = new_shard(), [np.zeros(SIZE, np.float32)]
    for update in updates:
        if update is None:
            shard.apply(Delta(np.ones(SIZE, np.float32)))
        elif isinstance(update, set):
            apply(shard, *sorted(update), packed=packed)
        else:
            shard.version += 1
        states.append(shard.w.copy())
    for base, before in enumerate(states):
        found = changed(shard, base)
        if found is not None:
            assert found == sorted(set(found))
            assert set(np.flatnonzero(before != shard.w)) <= set(found)
