"""Large vectors in several threads come to the same as in one, to the last bit."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from kept_states import adagrad, created, dense, reopened, snapshot, sparse, spec_of

from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.compress.none import Dense, DenseOptions
from dlctl.model.vector import euclidean_norm, is_finite, put_into
from dlctl.shards.base import Shard, Spec
from dlctl.shards.image import ImageForm
from dlctl.shards.mapped import Mapped
from dlctl.shards.memory import InMemory
from dlctl.util import threads
from dlctl.util.threads import BLOCK, PART, in_parts

SIZE = 2 * PART + 17
AMID = {"block updated", "undo block written", "block scattered", "vector copied"}
"""Points in the middle of an update of a mapped state."""


@pytest.fixture
def use_threads(monkeypatch):
    """Have so many, whatever this machine has."""

    def use(count: int) -> None:
        monkeypatch.setattr(threads, "threads", lambda: count)
        threads._pool.cache_clear()

    yield use
    threads._pool.cache_clear()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 35])
def test_parts_cover_everything_once_and_their_results_come_in_order(use_threads, count, size):
    use_threads(count)
    bounds = in_parts(size, lambda lo, hi: (lo, hi), 10)
    assert [i for lo, hi in bounds for i in range(lo, hi)] == [*range(size)]
    assert len(bounds) == max(1, -(-size // 10))


def test_what_fails_in_one_part_is_raised_when_no_other_is_at_work(use_threads):
    use_threads(2)
    second_is_at_work, ended = threading.Event(), []

    def work(lo: int, hi: int) -> None:
        if lo == 0:
            assert second_is_at_work.wait(10)
            raise ValueError("the first part")
        second_is_at_work.set()
        sum(range(1_000_000))
        ended.append(lo)

    with pytest.raises(ValueError, match="part"):
        in_parts(2, work, 1)
    assert ended == [1]


def test_where_no_more_threads_may_be_one_does_it_all(use_threads, monkeypatch):
    """As with a limit of processes that is nearly reached: the first one begins, the second not."""
    use_threads(2)
    begun, start = [], threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        begun.append(thread)
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    for _ in range(2):
        assert in_parts(3, lambda lo, hi: (lo, threading.get_ident()), 1) == [
            (lo, threading.get_ident()) for lo in range(3)
        ]
    assert len(begun) == 2
    begun[0].join(10)
    assert not begun[0].is_alive()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_off_has_threads_of_its_own(use_threads):
    use_threads(2)
    both_are_there = threading.Barrier(2)
    in_parts(2, lambda lo, hi: both_are_there.wait(10), 1)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # Nobody would ever do the work of threads that are not there.
        os._exit(0 if in_parts(2, lambda lo, hi: lo, 1) == [0, 1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_is_longer_or_shorter_is_not_copied():
    target = np.zeros(2, np.float32)
    for length in (1, 3):
        with pytest.raises(AssertionError, match=f"{length} elements"):
            threads.copy(target, np.ones(length, np.float32))
    assert not target.any()


def updates() -> Iterator[Delta]:
    yield dense(1, SIZE)
    yield sparse(2, SIZE, 3 * BLOCK + 5)
    yield sparse(3, SIZE, 2 * BLOCK)
    yield dense(4, SIZE)
    yield sparse(5, SIZE, SIZE // 2)


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("name", registry.names("optimizers"))
@pytest.mark.parametrize("is_mapped", [False, True], ids=["in memory", "mapped"])
def test_an_update_does_not_show_how_many_threads_have_made_it(use_threads, name, is_mapped):
    def states(threads: int) -> Iterator[object]:
        use_threads(threads)
        kind = registry.load("optimizers", name)
        optimizer = kind(kind.Options())
        spec = Spec("run", 0, 0, SIZE, optimizer.slots)
        buffer = bytearray(ImageForm.of(spec, "boot").total_bytes) if is_mapped else None
        storage = Mapped.create(buffer, spec, "boot") if is_mapped else InMemory().create(spec)
        shard = Shard(optimizer, storage)
        for number, delta in enumerate(updates()):
            shard.apply(delta)
            shard.commit({"number": number})
            yield snapshot(shard)
            changes = shard.changes_since(number)
            yield changes and [changes.values.tobytes(), changes.positions.tobytes()]

    one, three = list(states(1)), list(states(3))
    assert one == three
    is_remembered = any(isinstance(state, list) for state in one)
    assert is_remembered or hasattr(registry.load("optimizers", name), "sweeps_next")


@pytest.mark.long
def test_a_kill_while_several_threads_write_leaves_the_last_commit(use_threads):
    """What is in the memory at a point of one thread, while the others go on, is what a kill
    leaves there.
    """
    use_threads(3)
    optimizer = adagrad()
    spec = spec_of(optimizer, SIZE)
    passed: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    images, last = [], None

    def point(name: str) -> None:
        if last is not None and name in AMID and next(passed[name]) in (0, 2, 7):
            images.append((name, bytes(buffer), last))

    buffer, shard = created(optimizer, spec, point)
    can_be_undone = sparse(6, SIZE, 2 * BLOCK)
    for number, delta in enumerate([can_be_undone, *updates(), *[can_be_undone] * 2]):
        shard.apply(delta)
        shard.commit({"number": number})
        last = number, snapshot(shard)
        passed.clear()
    assert {name for name, _, _ in images} == AMID
    for name, image, (number, state) in images:
        found, meta = reopened(bytearray(image), adagrad(), spec)
        assert meta == {"number": number}, name
        assert snapshot(found) == state, name


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_taken_is_all_of_it_and_leaves_zeros(use_threads, threads):
    use_threads(threads)
    u = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    before = u.copy()
    compressor = Dense(DenseOptions())
    (taken,) = compressor.take(u).arrays
    assert np.array_equal(taken, before)
    assert not u.any()
    compressor.take(u)
    assert np.array_equal(taken, before), "the memory of a push was used again too early"


@pytest.mark.parametrize("threads", [1, 3])
def test_a_norm_is_the_same_with_any_number_of_threads(use_threads, threads):
    u = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    use_threads(1)
    once = euclidean_norm(u)
    use_threads(threads)
    assert euclidean_norm(u) == once
    assert once == pytest.approx(float(np.linalg.norm(u.astype(np.float64))), rel=1e-5)
    for bad in (np.nan, np.inf):
        u[-1] = bad
        assert not is_finite(u)


@pytest.mark.parametrize("threads", [1, 3])
def test_values_are_put_where_they_belong(use_threads, threads):
    use_threads(threads)
    where = sparse(0, SIZE, 3 * BLOCK + 5).indices
    values = np.arange(where.size, dtype=np.float32)
    target, expected = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    put_into(target, where, values)
    expected[where] = values
    assert np.array_equal(target, expected)
