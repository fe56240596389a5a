"""Rows of a few natural numbers each, as arrays in messages: they may not fit into a header."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dlctl.errors import RemoteProtocolError
from dlctl.wire.messages import Array


def packed(rows: Iterable[tuple[int, ...]]) -> Array:
    """int64[width n]: the rows one after the other."""
    return np.array(sorted(rows), np.int64).reshape(-1)


def rows_in(numbers: Array, width: int) -> list[list[int]]:
    """Rows of `width` numbers. Raises RemoteProtocolError for anything else."""
    is_whole = numbers.dtype == np.int64 and numbers.size % width == 0
    if not is_whole or (numbers < 0).any():
        raise RemoteProtocolError(f"these are not rows of {width} numbers")
    rows: list[list[int]] = numbers.reshape(-1, width).tolist()
    return rows
