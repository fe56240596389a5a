"""Large vectors in several threads: numpy releases the GIL while it computes.

One core cannot use the machine's whole memory bandwidth. Elementwise operations may be done in
parts, in any order, with bit-identical results; sums are added part by part in their order, however
many threads there are.
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
"""Elements of one part, processed in order: enough to be worth waking a thread."""
BLOCK = 1 << 16
"""Elements that stay in the processor's cache while several passes are made over them."""
PLACES = 1 << 13
"""Scattered elements whose cache lines stay in the processor's cache."""
THREADS_MAX = 4
"""More threads only wait for memory."""


def in_parts(size: int, work: Callable[[int, int], T], part: int = PART) -> list[T]:
    """[work(lo, hi) for each part of range(size)], at least one. Several parts run concurrently, so
    no two may write to one place.

    When this returns or raises, no part is running any more. `work` must not call this itself with
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
    """Start work(lo, hi) for each part of range(lo, hi), as `in_parts` does, and do not wait. Work
    that is not worth waking a thread is done when this returns.
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
    """The number of threads: one for each core that this process may use, up to a few."""
    return min(THREADS_MAX, cores.usable())


@cache
def _pool() -> ThreadPoolExecutor | None:
    """A pool whose threads are all started already, so that none starts in the middle of an
    operation. None if the user's limit on processes leaves no room for them.
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


# A forked process has none of the threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


Array = npt.NDArray[Any]


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[int, Array] = {}


_scratch = _Scratch()


def scratch(size: int, number: int = 0) -> Array:
    """float32[size] of any content, for temporaries. Up to `BLOCK` elements are local to this
    thread, and the same memory for every call with this number; more are new memory.
    """
    if size > BLOCK:
        return np.empty(size, np.float32)
    found = _scratch.arrays.get(number)
    if found is None:
        found = _scratch.arrays[number] = np.empty(BLOCK, np.float32)
    return found[:size]
