"""What the newest versions of a shard have changed: which elements, hardly any values.

Who has version v, and asks a shard at version v + 3, needs the present values of what the last
three updates touched and nothing else. This remembers which elements those are, for as many of the
newest versions as there is room for. It knows them or says that it does not; a version that was
made in another way than by a sparse update (dense, a barrier's step without data, a method's own
writing) is never guessed at.

What several updates have touched is sent several times: the values are the same, and to merge the
positions would take longer than all the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dlctl.compress import indices
from dlctl.compress.base import Delta
from dlctl.messages import Array
from dlctl.optim.blocks import Block, Rule
from dlctl.vector import chosen

VERSIONS_MAX = 64
PART = 8
"""Of a shard's elements, one in so many may be remembered, in about 0.6 bytes per parameter. Within
one machine it is quicker from a third of that on to send all of them; over a network of 10 Gbit/s
it is not.
"""


class Changes(NamedTuple):
    """What differs from an earlier version, as it is now. Nobody may write to it."""

    values: Array
    """[n], of the type of what it was asked of."""
    positions: Array
    """uint8[...], as `compress/indices.py` packs them, update by update."""
    counts: tuple[int, ...]
    """How many of the n each update has touched."""
    lengths: tuple[int, ...]
    """Bytes of its positions."""


@dataclass(slots=True)
class _Update:
    """What one update has touched."""

    where: Array
    """uint32[n], or int64[n] if the shard is too large for that."""
    positions: Array | None
    """The same, packed; None: nobody has needed it yet."""

    def packed(self, size: int) -> Array:
        if self.positions is None:
            self.positions = indices.pack(self.where.astype(np.int64), size)
        return self.positions


class History:
    def __init__(self, size: int) -> None:
        """Of a shard of `size` elements."""
        self._size = size
        self._dtype = np.uint32 if size <= 2**32 else np.int64
        self._version: int | None = None
        """The version that `_updates` lead to; None: nothing is known."""
        self._updates: deque[_Update] = deque()
        """Those that made the newest versions, oldest first."""
        self._total = 0
        """Positions in all of them."""
        self._values: Array | None = None
        """What the newest of them has left; None: nobody has looked."""
        self.forgotten = 0
        """How often `forget` was called: the values may have changed while the version has not."""

    def forget(self) -> None:
        """Somebody has written to the shard: no difference to an earlier version is known."""
        self.forgotten += 1
        self._clear()

    def _clear(self) -> None:
        self._version = None
        self._updates.clear()
        self._total, self._values = 0, None

    def watch(self, version: int, delta: Delta, rule: Rule) -> Rule:
        """The rule of the update by `delta` that makes `version`, with an eye on what it leaves.

        Costs O(n) for n indices, however large the shard is; nothing if the delta is dense.
        """
        if not self.note(version, delta.indices, delta.positions):
            return rule
        values = self._values = np.empty(delta.values.size, np.float32)
        return lambda blocks: rule(_noting(blocks, values))

    def note(self, version: int, where: Array | None, positions: Array | None = None) -> bool:
        """The update that makes `version` changes these elements (strictly increasing), and no
        others; None: any. positions: the same, packed. Returns whether that is remembered.
        """
        is_known = where is not None and where.size <= self._size // PART
        if not is_known or self._version != version - 1:
            self._clear()
        if where is None or not is_known:
            return False
        self._version, self._values = version, None
        # Copies: what has come lies in memory that is wanted back soon.
        positions = None if positions is None else positions.copy()
        self._updates.append(_Update(where.astype(self._dtype), positions))
        self._total += where.size
        while self._total > self._size // PART or len(self._updates) > VERSIONS_MAX:
            self._total -= self._updates.popleft().where.size
        return True

    def reaches(self, version: int) -> bool:
        """Whether what comes after `version` will be known."""
        return self._version == version

    def _after(self, base: int, version: int) -> list[_Update] | None:
        """The updates between `base` and the present `version`.

        None: they are not known, as `base` is too old, or newer than this shard has ever been.
        """
        steps = version - base
        if self._version != version or not 0 <= steps <= len(self._updates):
            return None
        return [*self._updates][len(self._updates) - steps :]

    def touched(self, base: int, version: int) -> list[Array] | None:
        """Where each of these updates has been (uint32 or int64); None: that is not known."""
        updates = self._after(base, version)
        return None if updates is None else [update.where for update in updates]

    def since(self, base: int, version: int, seen: Array) -> Changes | None:
        """What differs between `base` and the present `version`; None: that is not known.

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
    """The blocks; what an update leaves in them goes to its place in `values`."""
    for block in blocks:
        yield block
        values[block.at : block.at + block.w_next.size] = block.w_next


def _joined(parts: list[Array], dtype: np.dtype[Any]) -> Array:
    """All parts as one array; a single one as it is."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
