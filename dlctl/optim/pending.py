"""Error feedback before an optimiser: of each update it gets the largest elements, the rest waits.

    pending += g;  where |pending| >= threshold:  step(pending); pending = 0

The pending elements are a slot like the optimiser's own. Each update sets the threshold as a
counter, the bits of a float32 (`bits_of`): so the release depends on the update, the slot and the
counters alone, and a journal replays it exactly. For the optimiser, an element that is not released
is one that a sparse push does not contain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from dlctl.optim.base import Optimizer, Sweeping
from dlctl.optim.blocks import Block, BlockPlace, Rule
from dlctl.optim.wrapping import Wrapping, keep
from dlctl.wire.messages import Array

PENDING, THRESHOLD = "pending", "threshold"


class Pending(Wrapping):
    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner, [PENDING], {THRESHOLD: 0})

    def sweeps_next(self) -> bool:
        return isinstance(self.inner, Sweeping) and self.inner.sweeps_next()

    def begin_update(self) -> Rule:
        threshold = np.uint32(self.counters[THRESHOLD]).view(np.float32)
        of_all = self.sweeps_next()
        step = self.inner.begin_update()
        return lambda blocks: step(_released(blocks, threshold, of_all=of_all))


def bits_of(threshold: np.float32) -> int:
    return int(threshold.view(np.uint32))


def is_released(total: Array, threshold: np.float32) -> Array:
    """bool[n]. A NaN does not wait."""
    return ~(np.abs(total) < threshold)


def _released(blocks: Iterable[Block], threshold: np.float32, *, of_all: bool) -> Iterator[Block]:
    """The released elements of each block; of_all: all elements, with zeros for pending ones."""
    for block in blocks:
        total = block.slots[-1] + block.g
        released = is_released(total, threshold)
        block.slots_next[-1][:] = np.where(released, 0, total)
        inner = block._replace(slots=block.slots[:-1], slots_next=block.slots_next[:-1])
        if of_all or released.all():
            yield inner._replace(g=np.where(released, total, np.float32(0)))
            continue
        nexts = (inner.w_next, *inner.slots_next)
        for now, following in zip((inner.w, *inner.slots), nexts, strict=True):
            keep(now, following)
        where = np.flatnonzero(released)
        if not where.size:
            continue
        at, indices, _ = block.place
        place = BlockPlace(at, at + where if indices is None else indices[where])
        slots = tuple(slot[where] for slot in inner.slots_next)
        part = Block.in_place(place, inner.w_next[where], total[where], slots)
        yield part
        for following, values in zip(nexts, (part.w, *part.slots), strict=True):
            following[where] = values
