"""Whether an update has made anything infinite or NaN, for nothing: the processor takes note of it.

Of finite numbers others come only by an overflow, a division by zero or an invalid operation. The
processor notes each of these, and numpy looks at its notes after every operation anyhow. To look at
the values would take a sixth of an update or more, even while they are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dlctl.optim.blocks import Block, Rule


class Alarm:
    def __init__(self) -> None:
        self.has_rung = False
        """Something that an update came by may not be finite; or nothing of it was kept."""

    def over(self, rule: Rule) -> Rule:
        """The same rule; the alarm rings if need be. It goes on to its end all the same."""

        def heard(blocks: Iterable[Block]) -> None:
            with np.errstate(over="call", invalid="call", divide="call", call=self._ring):
                rule(blocks)

        return heard

    def _ring(self, what: str, flag: int) -> None:
        self.has_rung = True
