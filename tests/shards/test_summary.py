"""What workers see of a shard in 16 bits: close to it at any time, and right on average."""

from __future__ import annotations

import numpy as np
import pytest

from dlctl.compress.base import Delta
from dlctl.compress.values import Precision, as_float32
from dlctl.optim.sgd import SGD
from dlctl.shards.base import Shard
from dlctl.shards.memory import in_memory
from dlctl.shards.summary import Summary
from dlctl.util.threads import BLOCK, PART
from dlctl.wire.messages import Array

LAST_BIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of 1.0."""
both = pytest.mark.parametrize("precision", LAST_BIT)


def shard_of(w: Array) -> Shard:
    return in_memory(SGD(SGD.Options(lr=1.0)), w.astype(np.float32))


def step(shard: Shard, by: float, *where: int) -> None:
    """Add something to the elements at `where`, or to all."""
    if where:
        shard.apply(Delta(np.full(len(where), -by, np.float32), np.array(where)))
    else:
        shard.apply(Delta(np.full(shard.size, -by, np.float32)))


@both
@pytest.mark.parametrize("where", [(), (0,)], ids=["dense", "sparse"])
def test_on_average_workers_see_what_is_there(precision: Precision, where: tuple[int, ...]) -> None:
    """A third of the way from one number of the format to the next; rounding alone would show the
    lower one for ever.
    """
    w = 1.0 + LAST_BIT[precision] / 3
    shard, summary = shard_of(np.full(100, w)), Summary(precision)
    seen = []
    for _ in range(300):
        seen.append(float(as_float32(summary.of(shard))[0]))
        step(shard, 0.0, *where)
    assert set(seen) == {1.0, 1.0 + LAST_BIT[precision]}
    assert abs(np.mean(seen) - w) <= LAST_BIT[precision] / len(seen)


@both
def test_values_that_were_written_without_a_new_version_are_seen(precision: Precision) -> None:
    """As a method does that the coordinator drives; and a sparse update behind it hides nothing."""
    shard, summary = shard_of(np.ones(8)), Summary(precision)
    summary.of(shard)
    shard.w[:] = 2.0
    shard.history.forget()
    assert as_float32(summary.of(shard)).tolist() == [2.0] * 8
    shard.w[:] = 3.0
    shard.history.forget()
    step(shard, 1.0, 0)
    assert as_float32(summary.of(shard)).tolist() == [4.0] + [3.0] * 7


@both
def test_steps_below_the_last_bit_are_seen_long_before_they_add_up_to_one(
    precision: Precision,
) -> None:
    shard, summary = shard_of(np.ones(1)), Summary(precision)
    tiny = LAST_BIT[precision] / 64
    means = []
    for _ in range(4):
        seen = []
        for _ in range(8):
            step(shard, tiny)
            seen.append(float(as_float32(summary.of(shard))[0]))
        means.append(np.mean(seen))
    assert means[-1] > means[0]
    assert abs(means[-1] - float(shard.w[0])) < LAST_BIT[precision] / 4


@both
def test_a_version_is_summed_up_once_whoever_asks(precision: Precision) -> None:
    shard, summary = shard_of(np.linspace(-3.0, 3.0, 50)), Summary(precision)
    first = summary.of(shard).copy()
    assert all(np.array_equal(summary.of(shard), first) for _ in range(3))
    step(shard, 0.0)
    assert not np.array_equal(summary.of(shard), first), "the next one makes up for it"


@both
def test_what_was_not_touched_is_not_written_to(precision: Precision) -> None:
    """Else changes alone would not lead from one summary to the next."""
    shard, summary = shard_of(np.linspace(-3.0, 3.0, 64)), Summary(precision)
    before = summary.of(shard).copy()
    step(shard, 0.5, 3, 7)
    step(shard, 0.5, 7, 9)
    after = summary.of(shard)
    assert np.flatnonzero(before != after).tolist() == [3, 7, 9]
    changes = shard.changes_since(0, after)
    assert changes is not None
    assert changes.counts == (2, 2)
    assert np.array_equal(changes.values, after[[3, 7, 7, 9]])
    assert np.abs(as_float32(after) - shard.w).max() <= 4 * LAST_BIT[precision]


def test_whole_shards_are_rounded_the_same_in_parts_as_at_once() -> None:
    """Several threads, blocks and a rest of one."""
    random = np.random.default_rng(0)
    w = random.standard_normal(PART + BLOCK + 1).astype(np.float32)
    shard, summary = shard_of(w), Summary("float16")
    rest = np.zeros_like(w)
    for _ in range(3):
        u = shard.w + rest
        expected = u.astype(np.float16)
        rest = u - expected
        assert np.array_equal(summary.of(shard), expected)
        shard.apply(Delta(random.standard_normal(w.size).astype(np.float32)))


@pytest.mark.parametrize("too_large", [65520.0, -1e9, np.nan])
@pytest.mark.parametrize("where", [(), (4,)], ids=["dense", "sparse"])
def test_what_does_not_fit_ends_it_and_all_get_the_parameters(
    too_large: float, where: tuple[int, ...]
) -> None:
    shard, summary = shard_of(np.zeros(64)), Summary("float16")
    assert summary.of(shard).dtype == np.float16
    step(shard, 1.0, 1)
    step(shard, too_large, *where)
    assert summary.of(shard) is shard.w
    assert summary.precision == "float32"
    assert shard.changes_since(0) is shard.changes_since(1) is None
    step(shard, 1.0, 2)
    assert shard.changes_since(2) is not None
    assert summary.of(shard) is shard.w


def test_the_largest_number_of_the_format_still_fits() -> None:
    shard, summary = shard_of(np.full(2, 65504.0)), Summary("float16")
    assert as_float32(summary.of(shard)).tolist() == [65504.0, 65504.0]


def test_without_it_nothing_is_kept_and_nothing_is_done() -> None:
    shard, summary = shard_of(np.ones(4)), Summary("float32")
    assert summary.of(shard) is shard.w
    assert vars(summary)["_rest"].size == vars(summary)["_seen"].size == 0
