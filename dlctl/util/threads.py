"""Large vectors in several threads: numpy lets go of the interpreter while it computes.

One core moves less memory than a machine can. What is done to each element by itself may be done in
parts, in any order, and comes to the same to the last bit; what is summed is summed part by part in
their order, however many threads there are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dlctl.util import cores

T = TypeVar("T")
PART = 1 << 20
"""Elements of one part, which is gone through in their order: enough to wake a thread for."""
BLOCK = 1 << 16
"""Elements that stay in the processor's cache while several passes are made over them."""
PLACES = 1 << 13
"""Elements anywhere in memory whose surroundings stay in the processor's cache."""
THREADS_MAX = 4
"""More of them wait for memory."""


def in_parts(size: int, work: Callable[[int, int], T], part: int = PART) -> list[T]:
    """[work(lo, hi) for each part of range(size)], at least one; several at once if there are
    several, so that no two may write to one place.

    When this returns or raises, none is at work any more. `work` must not come here itself with
    several parts: it would wait for its own thread.
    """
    if size <= part:
        return [work(0, size)]
    bounds, pool = _bounds(0, size, part), _pool() if threads() > 1 else None
    if pool is None:
        return [work(lo, hi) for lo, hi in bounds]
    futures = [pool.submit(work, lo, hi) for lo, hi in bounds]
    wait(futures)
    return [future.result() for future in futures]


def begin(lo: int, hi: int, work: Callable[[int, int], T]) -> list[Future[T]]:
    """Have work(lo, hi) done for each part of range(lo, hi), as `in_parts` does, and do not wait.
    What is not enough to wake a thread for is done when this returns.
    """
    pool = _pool() if hi - lo >= PART and threads() > 1 else None
    if pool is None:
        work(lo, hi)
        return []
    return [pool.submit(work, *bounds) for bounds in _bounds(lo, hi, PART)]


def _bounds(lo: int, hi: int, part: int) -> list[tuple[int, int]]:
    return [(at, min(at + part, hi)) for at in range(lo, hi, part)]


def copy(target: Array, source: Array) -> None:
    """target[:] = source, of one length."""
    assert len(source) == len(target), f"{len(source)} elements for {len(target)}"

    def copy_part(lo: int, hi: int) -> None:
        target[lo:hi] = source[lo:hi]

    in_parts(len(target), copy_part, PART * 4 // target.itemsize)


@cache
def threads() -> int:
    """How many this process has for it: one for each core that it may use, up to a few."""
    return min(THREADS_MAX, cores.usable())


@cache
def _pool() -> ThreadPoolExecutor | None:
    """All of its threads, at work already: none has to be begun in the middle of something. None if
    the limit of this user's processes leaves no room for them.
    """
    pool = ThreadPoolExecutor(threads(), "parallel")
    all_there = threading.Barrier(threads() + 1)
    try:
        for _ in range(threads()):
            pool.submit(all_there.wait)
        all_there.wait()
    except RuntimeError:
        all_there.abort()
        pool.shutdown(wait=False)
        return None
    return pool


# A process that is forked off has none of the threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


Array = npt.NDArray[Any]


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[int, Array] = {}


_scratch = _Scratch()


def scratch(size: int, number: int = 0) -> Array:
    """float32[size], at most `BLOCK`, of any content, for temporaries. It is this thread's own, and
    the same memory whenever it asks for this number.
    """
    found = _scratch.arrays.get(number)
    if found is None:
        found = _scratch.arrays[number] = np.empty(BLOCK, np.float32)
    return found[:size]
