"""An exponential moving average of the parameters, behind any optimiser (Polyak and Juditsky 1992).

    w = optimiser(w);  average += (1 - ema) * (w - average)

It is a slot like the optimiser's own, initialised with the parameters (`Shard.begins_with`). So it
survives, is saved and is resharded like the others. Every update changes all of it: a sparse push
is made dense, with zeros where nothing was pushed, and costs as much as a dense one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from dlctl.optim.base import Optimizer
from dlctl.optim.blocks import Block, Rule
from dlctl.optim.wrapping import Wrapping
from dlctl.util.names import AVERAGE
from dlctl.util.threads import scratch


class Averaged(Wrapping):
    def __init__(self, inner: Optimizer, ema: float) -> None:
        """ema: the decay of the average per update, 0..1."""
        assert 0 < ema < 1, f"an average with {ema}"
        super().__init__(inner, [AVERAGE])
        self._part = np.float32(1 - ema)

    def begin_update(self) -> Rule:
        step = self.inner.begin_update()
        return lambda blocks: step(self._averaging(blocks))

    def _averaging(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Blocks for the inner optimiser; its results are added to the average."""
        for block in blocks:
            yield block._replace(slots=block.slots[:-1], slots_next=block.slots_next[:-1])
            average, displacement = block.slots[-1], scratch(block.w.size)
            np.subtract(block.w_next, average, out=displacement)
            displacement *= self._part
            np.add(average, displacement, out=block.slots_next[-1])
