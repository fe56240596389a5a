"""The changes of a shard's newest versions: which elements, but hardly any values.

A worker that has version v, and fetches at version v + 3, needs only the current values of the
elements that the last three updates touched. The history records those elements, for as many of the
newest versions as fit. Its answer is exact or None: a version that was not made by a sparse update
(but by a dense one, a barrier's step without data, a method's own write) is unknown.

An element that several updates touched is sent several times: the values are equal, and merging the
positions would take longer than everything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dlctl.compress import indices
from dlctl.compress.base import Delta
from dlctl.model.vector import chosen
from dlctl.optim.blocks import Block, Rule
from dlctl.wire.messages import Array

VERSIONS_MAX = 64
PART = 8
"""Divisor of the most elements to record: 1/8 of a shard's, in about 0.6 bytes per parameter.
Within one machine sending all elements is faster from a third of that on; over a 10 Gbit/s network
it is not.
"""


class Changes(NamedTuple):
    """The difference from an earlier version, as current values. Read-only."""

    values: Array
    """[n], of the type of `seen`."""
    positions: Array
    """uint8[...], as `compress/indices.py` packs them, update by update."""
    counts: tuple[int, ...]
    """How many of the n each update touched."""
    lengths: tuple[int, ...]
    """Bytes of the packed positions of each update."""


@dataclass(slots=True)
class _Update:
    """The elements that one update touched."""

    where: Array
    """uint32[n], or int64[n] if the shard is too large for that."""
    positions: Array | None
    """The positions of `where`, packed; None: not needed yet."""

    def packed(self, size: int) -> Array:
        if self.positions is None:
            self.positions = indices.pack(self.where.astype(np.int64), size)
        return self.positions


class History:
    def __init__(self, size: int) -> None:
        """size: the number of elements of the shard."""
        self._size = size
        self._dtype = np.uint32 if size <= 2**32 else np.int64
        self._version: int | None = None
        """The version that `_updates` lead to; None: nothing is known."""
        self._updates: deque[_Update] = deque()
        """The updates of the newest versions, oldest first."""
        self._total = 0
        """The number of positions in all recorded updates."""
        self._values: Array | None = None
        """The values that the newest update wrote; None: not recorded."""
        self.forgotten = 0
        """The number of calls of `forget`: the values may have changed while the version has not.
        """

    def forget(self) -> None:
        """The shard was written to directly: no difference from an earlier version is known."""
        self.forgotten += 1
        self._clear()

    def _clear(self) -> None:
        self._version = None
        self._updates.clear()
        self._total, self._values = 0, None

    def watch(self, version: int, delta: Delta, rule: Rule) -> Rule:
        """Wrap the rule of the update by `delta` that makes `version`, to record its results.

        Costs O(n) for n indices, independent of the shard's size; nothing if the delta is dense.
        """
        if not self.note(version, delta.indices, delta.positions):
            return rule
        values = self._values = np.empty(delta.values.size, np.float32)
        return lambda blocks: rule(_noting(blocks, values))

    def note(self, version: int, where: Array | None, positions: Array | None = None) -> bool:
        """Record that the update that makes `version` changes only these elements (strictly
        increasing); None: any. positions: the same, packed. Returns whether they are recorded.
        """
        is_known = where is not None and where.size <= self._size // PART
        if not is_known or self._version != version - 1:
            self._clear()
        if where is None or not is_known:
            return False
        self._version, self._values = version, None
        # Copies: the originals are in receive buffers, which are reused soon.
        positions = None if positions is None else positions.copy()
        self._updates.append(_Update(where.astype(self._dtype), positions))
        self._total += where.size
        while self._total > self._size // PART or len(self._updates) > VERSIONS_MAX:
            self._total -= self._updates.popleft().where.size
        return True

    def reaches(self, version: int) -> bool:
        """Whether changes after `version` will be known."""
        return self._version == version

    def _after(self, base: int, version: int) -> list[_Update] | None:
        """The updates between `base` and the current `version`.

        None: unknown, since `base` is too old, or newer than this shard has ever been.
        """
        steps = version - base
        if self._version != version or not 0 <= steps <= len(self._updates):
            return None
        return [*self._updates][len(self._updates) - steps :]

    def touched(self, base: int, version: int) -> list[Array] | None:
        """The elements that each of these updates touched (uint32 or int64); None: unknown."""
        updates = self._after(base, version)
        return None if updates is None else [update.where for update in updates]

    def since(self, base: int, version: int, seen: Array) -> Changes | None:
        """The difference between `base` and the current `version`; None: unknown.

        seen: the parameters (float32), or what workers see of them (16 bits).
        """
        updates = self._after(base, version)
        if updates is None:
            return None
        noted = self._values if seen.dtype == np.float32 and updates else None
        values = [chosen(seen, u.where) for u in (updates if noted is None else updates[:-1])]
        values += [] if noted is None else [noted]
        positions = [update.packed(self._size) for update in updates]
        counts = tuple(update.where.size for update in updates)
        lengths = tuple(part.size for part in positions)
        joined = _joined(positions, np.dtype("u1"))
        return Changes(_joined(values, seen.dtype), joined, counts, lengths)


def _noting(blocks: Iterable[Block], values: Array) -> Iterator[Block]:
    """The blocks, whose updated values are copied to their places in `values`."""
    for block in blocks:
        yield block
        values[block.at : block.at + block.w_next.size] = block.w_next


def _joined(parts: list[Array], dtype: np.dtype[Any]) -> Array:
    """All parts as one array; a single one as it is."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
