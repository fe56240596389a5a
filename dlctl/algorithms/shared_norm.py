"""The norm of a step whose parts are on several shards, which clip it by the common norm.

A side that averages declares it once: `self.shared_norm = SharedNorm(self._make_step)`. Before a
step it tells the norm of its own part (`tell`), and goes on when that of all parts is known:

    shard -> coordinator    `part`: (clock, square of the norm of its part)
    coordinator -> shard    `hear`: the sum of all; then the step is made

The messages, and who adds up, are in `dlctl/roles/coordinator/training/norms.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dlctl.wire.messages import PushOutcome

Squared = tuple[int, float]
"""(the clock of a step, the square of a norm)."""


class SharedNorm:
    """What one shard knows of it."""

    def __init__(self, make_step: Callable[[], list[PushOutcome]]) -> None:
        """make_step: makes the step that was waiting; returns the pushes that it settled."""
        self.is_needed = False
        """Whether steps are clipped, and there are several shards; set by the server role."""
        self._make_step = make_step
        self._own: Squared | None = None
        """The clock and the squared norm of the part that waits."""
        self._all: Squared | None = None
        """The newest known norm of all parts."""

    def is_missing(self, clock: int) -> bool:
        """Whether the step of this clock has to wait for it."""
        return self.is_needed and (self._all is None or self._all[0] != clock)

    def tell(self, clock: int, squared: float) -> None:
        """A step waits; the square of the norm of its part on this shard, 0 if it has none."""
        self._own = clock, squared

    def part(self) -> Squared | None:
        """What the other shards wait for, too; None: no step waits."""
        return self._own if self._own is not None and self.is_missing(self._own[0]) else None

    def hear(self, clock: int, squared: float) -> list[PushOutcome]:
        """The squared norm of what all shards are about to apply at this clock is known. It is
        binding for all of them, even if this shard's own part has changed since.
        """
        if self._own is None or clock != self._own[0]:
            return []
        self._all = clock, squared
        return self._make_step()

    def take(self) -> float | None:
        """The step is made now: the norm to clip it by; None: that of this shard's part."""
        self._own = None
        return math.sqrt(self._all[1]) if self._all is not None and self.is_needed else None
