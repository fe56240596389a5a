"""Memory is used again only when nobody looks at it any more."""

from __future__ import annotations

import numpy as np

from dlctl.util import buffer_pool
from dlctl.util.buffer_pool import BufferPool


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_what_somebody_still_sees_is_never_given_to_another() -> None:
    memory = BufferPool()
    first = memory.take(1000)
    where = address(first)
    seen = np.frombuffer(first.data[100:200], np.float32)
    del first
    second = memory.take(1000)
    assert address(second) != where
    second[:] = 7
    seen_before = seen.copy()
    assert np.array_equal(seen, seen_before, equal_nan=True)
    del seen
    assert address(memory.take(1000)) == where


def test_a_much_smaller_message_does_not_take_the_place_of_a_large_one() -> None:
    memory = BufferPool()
    where = address(memory.take(1000))
    small = memory.take(400)
    assert small.size == 400
    assert address(small) != where
    assert address(memory.take(600)) == where


def test_of_unused_pieces_few_are_kept() -> None:
    memory = BufferPool()
    for size in (1000, 10_000, 100_000, 1_000_000):
        memory.take(size)
    assert len(memory._arrays) <= buffer_pool.FREE_MAX


def test_of_very_many_pieces_some_are_looked_at_for_each_that_is_wanted(monkeypatch) -> None:
    """And not all: a server answers many workers at once, in many pieces each."""
    looks = 0
    honest = buffer_pool.is_unused

    def counted(arrays, at):
        nonlocal looks
        looks += 1
        return honest(arrays, at)

    monkeypatch.setattr(buffer_pool, "is_unused", counted)
    memory, count = BufferPool(400), 1000
    held = [memory.take(100) for _ in range(count)]
    assert looks <= count * buffer_pool.LOOKS_MAX
    places = {address(array) for array in held}
    del held[: count // 2]
    again = [memory.take(100) for _ in range(count // 2)]
    assert len(memory._arrays) <= 1.05 * count
    assert len(places & {address(array) for array in again}) > 0.9 * len(again)


def test_what_is_not_used_for_a_while_is_given_back() -> None:
    memory = BufferPool()
    held = memory.take(1000)
    memory.take(1000)
    for _ in range(buffer_pool.IDLE_CHECKS):
        memory.check()
    assert len(memory._arrays) == 2
    memory.check()
    assert len(memory._arrays) == 1
    assert held.size == 1000


def test_a_message_in_many_pieces_lies_in_the_same_memory_every_time() -> None:
    """The last piece of it is smaller; it must not cost the others their places."""
    sizes = [1000] * 40 + [100]
    memory = BufferPool(len(sizes))
    places = [{address(piece) for piece in [memory.take(size) for size in sizes]} for _ in range(3)]
    assert places[0] == places[1] == places[2]
    assert len(places[0]) == len(sizes)
