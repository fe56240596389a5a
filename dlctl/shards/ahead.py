"""A dense update that is worked on while its values are still coming.

It goes from the vectors that count into others, so that it is nothing until a commit says that the
others count from now on. If the rest of the values never comes, if they turn out to be poison, or
if another update comes first, what was done is dropped, and nobody has seen it.
"""

from __future__ import annotations

from concurrent.futures import Future, wait

import numpy as np

from dlctl.compress.base import Delta
from dlctl.optim.blocks import Cut, Rule
from dlctl.util import threads


class Ahead:
    def __init__(self, delta: Delta, cut: Cut, rule: Rule) -> None:
        """`delta`: dense; its memory is used for nothing else as long as somebody holds it.
        `cut`: its blocks, whose next values go where nobody reads. `rule`: the one of this update.
        """
        self._delta = delta
        self._cut = cut
        self._rule = rule
        self._begun = 0
        """So many of the first values have been taken up."""
        self._parts: list[Future[None]] = []

    def is_of(self, delta: Delta) -> bool:
        """Whether this is the update by `delta`. The same memory holds the same values."""
        return np.may_share_memory(self._delta.values, delta.values)

    def come(self, count: int) -> None:
        """The first `count` values are there."""
        if count > self._begun:
            self._parts += threads.begin(self._begun, count, self._work)
            self._begun = count

    def _work(self, lo: int, hi: int) -> None:
        with np.errstate(all="ignore"):  # Whether they are finite is seen when all have come.
            self._rule(self._cut(lo, hi))

    def finish(self) -> None:
        """All values are there; when this returns, their update is made."""
        self.come(self._delta.values.size)
        wait(self._parts)
        for part in self._parts:
            part.result()

    def drop(self) -> None:
        """When this returns, nothing is written any more."""
        for part in self._parts:
            part.cancel()
        wait(self._parts)
