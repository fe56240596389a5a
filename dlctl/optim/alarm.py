"""Detect at no cost whether an update has produced an infinity or NaN, by the processor's flags.

Finite numbers only become infinite or NaN by an overflow, a division by zero or an invalid
operation. The processor sets a flag for each of these, and numpy checks the flags after every
operation anyway. Checking the values would take a sixth of an update or more, even while they are
in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dlctl.optim.blocks import Block, Rule


class Alarm:
    def __init__(self) -> None:
        self.has_rung = False
        """Whether an update may have produced values that are not finite, even if temporarily."""

    def over(self, rule: Rule) -> Rule:
        """The same update rule, monitored: it runs to its end even if the alarm has rung."""

        def heard(blocks: Iterable[Block]) -> None:
            with np.errstate(over="call", invalid="call", divide="call", call=self._ring):
                rule(blocks)

        return heard

    def _ring(self, what: str, flag: int) -> None:
        self.has_rung = True
