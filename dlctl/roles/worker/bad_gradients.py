"""Unusable results of a worker: not finite, too large, or refused by a server.

A NaN would stay in the residual for ever, and a NaN in a shard would soon be in every replica. A
server accepts no push that could make its values infinite. So a gradient that is not finite, or on
its own larger than the limit of a push, is discarded here: a step along it would take the replica
far from all others, and gradients computed there might be small enough to be accepted.
"""

from __future__ import annotations

import sys
from collections import Counter, deque

from dlctl.roles.protocol.context import Context

NAMED_IN_ROW = 3
"""Consecutive discarded gradients that are logged one by one."""
BATCHES_KEPT = 256
"""Number of newest steps whose batches can be named in messages."""


class BadGradients:
    def __init__(self, push_norm_max: float) -> None:
        self._push_norm_max = push_norm_max
        self.steps = self.steps_in_row = 0
        """Gradients that were not finite, or too large."""
        self.pushes = 0
        """Pushes that a server refused."""
        self.last = ""
        """The batches of the last unusable gradient or push."""
        self.reason = ""
        """Reason of the last refusal by a server."""
        self._batches: deque[tuple[int, str]] = deque(maxlen=BATCHES_KEPT)
        self._in_row: Counter[int] = Counter()
        """Table -> refused pushes since one that was not."""

    @property
    def pushes_in_row(self) -> int:
        """The most refused pushes in a row, over the tables."""
        return max(self._in_row.values(), default=0)

    def norm_max(self, own_lr: float | None) -> float:
        """Limit of a gradient that is pushed; or of one along which a replica steps with this
        learning rate, and then pushes the difference: with plain SGD a server would refuse a larger
        one, and for other optimisers the limit does no harm.
        """
        return min(self._push_norm_max / (own_lr or 1.0), sys.float_info.max)

    def computed(self, step: int, where: str) -> None:
        """Count a usable gradient, of the batch `where`."""
        self.steps_in_row = 0
        self._batches.append((step, where))

    def discard(self, what: str) -> None:
        self.steps += 1
        self.steps_in_row += 1
        self.last = what

    def note(self, context: Context) -> None:
        """Log the newest discarded gradient, if it is one of the first in a row."""
        more = NAMED_IN_ROW - self.steps_in_row
        if more >= 0:
            rest = "" if more else "; further consecutive ones are only counted"
            context.note("warning", f"discarded, not pushed: {self.last}{rest}")

    def refused(self, reason: str, first_step: int, last_step: int, table: int = 0) -> None:
        """A push of these steps was refused by one shard or several."""
        self.pushes += 1
        self._in_row[table] += 1
        self.reason = reason
        names = [where for step, where in self._batches if first_step <= step <= last_step]
        self.last = ", ".join(names[-8:]) or f"steps {first_step} to {last_step}"

    def accepted(self, table: int = 0) -> None:
        """No shard has refused a push: the row of refusals ends."""
        self._in_row[table] = 0
