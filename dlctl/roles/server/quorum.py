"""What a server tells the coordinator of the pushes that it holds, and what it hears of them.

Each `Holding` says all of it, so one that is lost costs nothing but time: it comes again after
`resend_s`, and then less often, as long as nothing changes. It also tells the step that the shard
is at: that is how the coordinator learns that a decision has been carried out.
"""

from __future__ import annotations

from dlctl import messages as m
from dlctl.algorithms.base import Decision
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.rows import packed, rows_in
from dlctl.roles.server.shard_protocol import ShardProtocol

PAUSE_MAX = 4
"""Times `resend_s`, between two that say the same."""


class AsksLead:
    def __init__(self, context: Context, serving: ShardProtocol) -> None:
        self.context = context
        self.serving = serving
        self._told: tuple[int, list[tuple[int, int, int, int]]] | None = None
        self._number = 0
        self._pause_s = 0.0
        self._due_at: float | None = None

    def tell_if_due(self, now: float) -> None:
        """Say what is held, if it is something else than before or has not been said for a while.
        A shard that is closed, or has no values yet, takes part in no decision.
        """
        if not self.serving.initialised or self.serving.last_checkpoint:
            self._told = self._due_at = None
            return
        held = (self.serving.shard.version, self.serving.side.held())
        resend_s = self.context.retries.resend_s
        if held != self._told:
            self._told, self._pause_s = held, resend_s
            self._number += 1
        elif self._due_at is not None and now < self._due_at:
            return
        else:
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX * resend_s)
        self._due_at = now + self._pause_s
        clock, pushes = held
        of = (self.serving.index, self.serving.generation)
        self.context.send(COORDINATOR, m.Holding(*of, self._number, clock, packed(pushes)))

    def tell_again(self, now: float) -> None:
        """What was said may be lost, or the coordinator is a new one."""
        self._due_at = now

    def deadline(self) -> float | None:
        return self._due_at

    def on_decided(self, message: m.Decided) -> None:
        """Raises RemoteProtocolError."""
        if self.serving.initialised and not self.serving.last_checkpoint:
            used, gone = (
                frozenset((slot, epoch) for slot, epoch in rows_in(numbers, 2))
                for numbers in (message.used, message.gone)
            )
            self.serving.parameters.decided(Decision(message.clock, used, gone))
