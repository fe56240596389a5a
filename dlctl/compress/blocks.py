"""A vector as rows of 1,024 elements, for compressors with one scale or mean for each row.

A compressor implements its work on rows once, in operations that numpy arrays and torch tensors
share. On the host it is called with a few rows at a time, which stay in the cache; on a GPU with
all of them at once. The last row, if it is shorter, is dealt with on the host in either case.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dlctl.model.vector import Vector, copy_into, host_view, to_host
from dlctl.wire.messages import Array

BLOCK = 1024
"""The number of elements of a row of the blocks."""
ROWS = 64
"""Rows at a time on the host: 256 kB of float32."""

Part = tuple[Array, ...]
"""The sent arrays of some rows: one per frame, on the host."""


def count(size: int) -> int:
    """Rows of a vector of `size` elements, a shorter one at the end included."""
    return -(-size // BLOCK)


def take_rows(u: Vector, take: Callable[[Vector], Part]) -> Part:
    """The sent arrays of all rows: `take` gets some rows of `u` [n, 1024], or [1, n] at the end,
    leaves the residual in them, and returns the sent arrays.
    """
    u = host_view(u)
    whole = len(u) // BLOCK * BLOCK
    rows = u[:whole].reshape(-1, BLOCK)
    step = ROWS if isinstance(u, np.ndarray) else max(1, len(rows))
    parts = [take(rows[lo : lo + step]) for lo in range(0, len(rows), step)]
    if whole < len(u):
        rest = to_host(u[whole:]).reshape(1, -1)
        parts.append(take(rest))
        if not isinstance(u, np.ndarray):
            copy_into(u[whole:], rest[0])
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def fill_rows(size: int, fill: Callable[[Array, int], None]) -> Array:
    """float32[size]: `fill` writes some rows of it, given the number of their first row."""
    values = np.empty(size, np.float32)
    whole = size // BLOCK * BLOCK
    rows = values[:whole].reshape(-1, BLOCK)
    for lo in range(0, len(rows), ROWS):
        fill(rows[lo : lo + ROWS], lo)
    if whole < size:
        fill(values[whole:].reshape(1, -1), len(rows))
    return values
