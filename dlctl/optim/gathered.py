"""A sum before an optimiser: pushes are gathered until one says that the step is made.

    sum += n g, for each push of n samples;  then:  step(sum / n of all); sum = 0

The sum is a slot like the optimiser's own, and the samples in it are one of its counters, as in
`buffered.py`. An update for which neither is said is one of the optimiser alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from dlctl.optim.base import Optimizer
from dlctl.optim.blocks import Block, Rule
from dlctl.optim.wrapping import Wrapping, keep

SUM = "gathered"
GATHERED, TAKES, FOLDS = "gathered", "takes", "folds"


class Gathered(Wrapping):
    """What the next update does is set with it (`Shard.apply`): `TAKES`, the samples of a gradient
    that is gathered; `FOLDS`: 1, the step is made, of a gradient of zeros.
    """

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner, [SUM], {GATHERED: 0, TAKES: 0, FOLDS: 0})

    def begin_update(self) -> Rule:
        counters = self.counters
        takes, folds, samples = counters[TAKES], counters[FOLDS], counters[GATHERED]
        counters[TAKES] = counters[FOLDS] = 0
        if takes:
            counters[GATHERED] = samples + takes
            return lambda blocks: _gather(blocks, np.float32(takes))
        if folds and samples:
            counters[GATHERED] = 0
        step, share = self.inner.begin_update(), np.float32(1 / samples if folds and samples else 0)
        return lambda blocks: step(_inner(blocks, share))


def _gather(blocks: Iterable[Block], samples: np.float32) -> None:
    """sum += n g; all else is unchanged."""
    for block in blocks:
        keep(block.w, block.w_next)
        for slot, following in zip(block.slots[:-1], block.slots_next[:-1], strict=True):
            keep(slot, following)
        np.add(block.slots[-1], samples * block.g, out=block.slots_next[-1])


def _inner(blocks: Iterable[Block], share: np.float32) -> Iterator[Block]:
    """Blocks for the inner optimiser. share: of the sum, which is empty then; 0: it stays."""
    for block in blocks:
        gradient = block.slots[-1] * share + block.g if share else block.g
        yield block._replace(g=gradient, slots=block.slots[:-1], slots_next=block.slots_next[:-1])
        if share:
            block.slots_next[-1][:] = 0
        else:
            keep(block.slots[-1], block.slots_next[-1])
