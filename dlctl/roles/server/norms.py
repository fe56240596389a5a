"""What a server tells the coordinator of the norm of an update that all shards clip together.

It is told again, more and more seldom, until the sum is known: a lost message, a new coordinator
and one that waits for the other shards are one case.
"""

from __future__ import annotations

from dlctl import messages as m
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.server.shard_protocol import ShardProtocol

PAUSE_MAX = 4
"""Times `resend_s`, between two that say the same."""


class SharesNorm:
    def __init__(self, context: Context, serving: ShardProtocol) -> None:
        self.context = context
        self.serving = serving
        self._told: tuple[int, float] | None = None
        self._pause_s = 0.0
        self._due_at: float | None = None

    def tell_if_due(self, now: float) -> None:
        """Say what waits, if it is something else than before or has not been said for a while."""
        part = self.serving.side.norm_part()
        if part is None or self.serving.last_checkpoint:
            self._told = self._due_at = None
            return
        resend_s = self.context.retries.resend_s
        if part != self._told:
            self._told, self._pause_s = part, resend_s
        elif self._due_at is not None and now < self._due_at:
            return
        else:
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX * resend_s)
        self._due_at = now + self._pause_s
        of = (self.serving.index, self.serving.generation)
        self.context.send(COORDINATOR, m.NormPart(*of, *part))

    def tell_again(self, now: float) -> None:
        """What was said may be lost, or the coordinator is a new one."""
        if self._told is not None:
            self._due_at = now

    def deadline(self) -> float | None:
        return self._due_at

    def on_total(self, message: m.NormTotal) -> None:
        if self.serving.initialised and not self.serving.last_checkpoint:
            self.serving.parameters.norm_known(message.clock, message.squared)
