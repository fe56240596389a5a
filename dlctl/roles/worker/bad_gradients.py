"""What a worker computes and nobody can use: not finite, too large, or refused by a server.

A NaN would stay in the residual for ever, and one that got into a shard would be in every replica a
moment later. A server takes no push that could make its values infinite. So a gradient that is not
finite, or alone larger than any push may be, gets no further than here: with a step along it a
replica would come to where no other one is, and what it computed there might be small enough to
be taken.
"""

from __future__ import annotations

import sys
from collections import Counter, deque

BATCHES_KEPT = 256
"""Steps whose batches can still be named."""


class BadGradients:
    def __init__(self, push_norm_max: float) -> None:
        self._push_norm_max = push_norm_max
        self.steps = self.steps_in_row = 0
        """Gradients that were not finite, or too large."""
        self.pushes = 0
        """Pushes that a server refused."""
        self.last = ""
        """Which batches it was."""
        self.reason = ""
        """Of the server that refused last."""
        self._batches: deque[tuple[int, str]] = deque(maxlen=BATCHES_KEPT)
        self._refused: set[int] = set()
        """Pushes that a shard has refused and that not all shards have answered."""
        self._newest_refused: dict[int, int] = {}
        """Table -> a push."""
        self._in_row: Counter[int] = Counter()
        """Table -> refused pushes since one that was not."""

    @property
    def pushes_in_row(self) -> int:
        """To one table."""
        return max(self._in_row.values(), default=0)

    def norm_max(self, own_lr: float | None) -> float:
        """Of a gradient that is pushed; or of one along which a replica steps with this rate, and
        pushes the way: with plain SGD no server would take it, and no other optimiser is harmed.
        """
        return min(self._push_norm_max / (own_lr or 1.0), sys.float_info.max)

    def computed(self, step: int, where: str) -> None:
        """A gradient that is of use, of the batch `where`."""
        self.steps_in_row = 0
        self._batches.append((step, where))

    def discard(self, what: str) -> None:
        self.steps += 1
        self.steps_in_row += 1
        self.last = what

    def refused(
        self, number: int, reason: str, first_step: int, last_step: int, *, table: int = 0
    ) -> None:
        """A shard has refused this push, of these steps; counted once, however many shards do."""
        if number in self._refused:
            return
        self._refused.add(number)
        self._newest_refused[table] = max(number, self._newest_refused.get(table, -1))
        self.pushes += 1
        self._in_row[table] += 1
        self.reason = reason
        names = [where for step, where in self._batches if first_step <= step <= last_step]
        self.last = ", ".join(names[-8:]) or f"steps {first_step} to {last_step}"

    def settled(self, number: int, table: int = 0) -> None:
        """All shards have answered this push; if one has refused it, it does not end the row."""
        self._refused.discard(number)
        if number > self._newest_refused.get(table, -1):
            self._in_row[table] = 0
