"""A dense update that is computed while its values are still arriving.

It reads the active vectors and writes to inactive ones, so it has no effect until a commit makes
those active. If the rest of the values never arrives, if they are invalid, or if another update is
applied first, the result is dropped, and it was never visible.

The squares of a block are summed while it is in the processor's cache, so that the check of a push
needs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait

import numpy as np

from dlctl.compress.base import Delta
from dlctl.model.vector import squares_of_block
from dlctl.optim.blocks import Block, Cut, Rule
from dlctl.util import threads


class Ahead:
    def __init__(self, delta: Delta, cut: Cut, rule: Rule) -> None:
        """`delta`: dense; its memory is not reused while this object refers to it. `cut`: its
        blocks, whose next values go to inactive memory. `rule`: of this update.
        """
        self._delta = delta
        self._cut = cut
        self._rule = rule
        self._begun = 0
        """Number of leading values whose processing has begun."""
        self._parts: list[Future[None]] = []
        self._sums: list[tuple[int, float]] = []
        """(length, sum of the squares) of the blocks that were processed, in any order."""

    def is_of(self, delta: Delta) -> bool:
        """Whether this is the update by `delta`. The same memory holds the same values."""
        return np.may_share_memory(self._delta.values, delta.values)

    def come(self, count: int) -> None:
        """The first `count` values have arrived."""
        if count > self._begun:
            self._parts += threads.begin(self._begun, count, self._work)
            self._begun = count

    def _work(self, lo: int, hi: int) -> None:
        with np.errstate(all="ignore"):  # They are checked when all have arrived.
            self._rule(self._summed(lo, hi))

    def _summed(self, lo: int, hi: int) -> Iterator[Block]:
        for block in self._cut(lo, hi):
            self._sums.append((block.g.size, squares_of_block(block.g)))
            yield block

    def finish(self) -> None:
        """All values have arrived; when this returns, the update is computed."""
        self.come(self._delta.values.size)
        wait(self._parts)
        for part in self._parts:
            part.result()

    def squares(self) -> float | None:
        """The sum of the squares of all values, about; None: the rule has left some out. All values
        have arrived."""
        self.finish()
        is_whole = sum(length for length, _ in self._sums) == self._delta.values.size
        return sum(squares for _, squares in self._sums) if is_whole else None

    def drop(self) -> None:
        """Cancel; after this returns, nothing is written any more."""
        for part in self._parts:
            part.cancel()
        wait(self._parts)
