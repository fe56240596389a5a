"""A buffer before an optimiser: of every K pushes the mean is one update (FedBuff, Nguyen 2022).

    buffer += g;  every K-th push:  step(buffer / K); buffer = 0

The buffer is a slot like the optimiser's own, the count one of its counters, and so is K, which any
push may set (`Shard.apply`). So a push that is only buffered is part of the commit that
acknowledges it, in every kind of storage, and a journal replays it exactly. The step is made of all
elements, however sparse the push that completes it, and the mean is of all buffered pushes: of more
than K, if K has just become smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from dlctl.optim.base import Optimizer
from dlctl.optim.blocks import Block, Rule
from dlctl.optim.wrapping import Wrapping, keep

BUFFER = "buffer"
BUFFERED, STEPS, CAPACITY = "buffered", "steps", "capacity"


class Buffered(Wrapping):
    def __init__(self, inner: Optimizer, capacity: int) -> None:
        """capacity: K, pushes for one update, until a push sets another one."""
        assert capacity >= 1, f"a buffer for {capacity} pushes"
        super().__init__(inner, [BUFFER], {BUFFERED: 0, STEPS: 0, CAPACITY: capacity})

    def sweeps_next(self) -> bool:
        return bool(self.counters[BUFFERED] + 1 >= self.counters[CAPACITY])

    def begin_update(self) -> Rule:
        self.counters[BUFFERED] += 1
        pushes = self.counters[BUFFERED]
        if pushes < self.counters[CAPACITY]:
            return _accumulate
        self.counters[BUFFERED] = 0
        self.counters[STEPS] += 1
        step, share = self.inner.begin_update(), np.float32(1 / pushes)
        return lambda blocks: step(_emptied(blocks, share))


def _accumulate(blocks: Iterable[Block]) -> None:
    """buffer += g; all else is unchanged."""
    for block in blocks:
        keep(block.w, block.w_next)
        for slot, following in zip(block.slots[:-1], block.slots_next[:-1], strict=True):
            keep(slot, following)
        np.add(block.slots[-1], block.g, out=block.slots_next[-1])


def _emptied(blocks: Iterable[Block], share: np.float32) -> Iterator[Block]:
    """Blocks for the inner optimiser: their gradient is the mean, and the buffer is empty."""
    for block in blocks:
        mean = (block.slots[-1] + block.g) * share
        yield block._replace(g=mean, slots=block.slots[:-1], slots_next=block.slots_next[:-1])
        block.slots_next[-1][:] = 0
