"""What a server tells the coordinator until something comes of it: the pushes that it holds, for
the lead to decide about, and its part of a norm by which all shards clip.

Each message says all there is to say, so one that is lost costs nothing but time: it comes again
after `resend_s`, and then less often, as long as nothing changes. A new coordinator, and one that
waits for the other shards, are no other cases.
"""

from __future__ import annotations

from typing import Any

from dlctl import messages as m
from dlctl.algorithms.base import Decision
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.rows import packed, rows_in
from dlctl.roles.server.shard_protocol import ShardProtocol

PAUSE_MAX = 4
"""Times `resend_s`, between two that say the same."""


class Telling:
    def __init__(self, context: Context, serving: ShardProtocol) -> None:
        self.context = context
        self.serving = serving
        self._told: Any = None
        self._number = 0
        self._pause_s = 0.0
        self._due_at: float | None = None

    @property
    def _is_open(self) -> bool:
        """A shard that is closed, or has no values yet, takes part in nothing."""
        return self.serving.initialised and not self.serving.last_checkpoint

    def _state(self) -> Any:
        """What there is to tell; None: nothing."""
        raise NotImplementedError

    def _message(self, shard: int, generation: int, number: int) -> m.Message:
        """`_told` as a message; number: how often there was something else to tell."""
        raise NotImplementedError

    def tell_if_due(self, now: float) -> None:
        """Tell what is something else than before or has not been told for a while."""
        state = self._state() if self._is_open else None
        if state is None:
            self._told = self._due_at = None
            return
        resend_s = self.context.retries.resend_s
        if state != self._told:
            self._told, self._pause_s = state, resend_s
            self._number += 1
        elif self._due_at is not None and now < self._due_at:
            return
        else:
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX * resend_s)
        self._due_at = now + self._pause_s
        of = (self.serving.index, self.serving.generation, self._number)
        self.context.send(COORDINATOR, self._message(*of))

    def tell_again(self, now: float) -> None:
        """What was told may be lost, or the coordinator is a new one."""
        self._due_at = now

    def deadline(self) -> float | None:
        return self._due_at


class AsksLead(Telling):
    """The step that the shard is at, by which the coordinator learns that a decision has been
    carried out, and the pushes that it holds.
    """

    def _state(self) -> tuple[int, list[tuple[int, int, int, int]]]:
        return self.serving.shard.version, self.serving.side.held()

    def _message(self, shard: int, generation: int, number: int) -> m.Message:
        clock, pushes = self._told
        return m.Holding(shard, generation, number, clock, packed(pushes))

    def on_decided(self, message: m.Decided) -> None:
        """Raises RemoteProtocolError."""
        if self._is_open:
            used, gone = (
                frozenset((slot, epoch) for slot, epoch in rows_in(numbers, 2))
                for numbers in (message.used, message.gone)
            )
            self.serving.parameters.decided(Decision(message.clock, used, gone))


class SharesNorm(Telling):
    """The square of the norm of this shard's part of a step."""

    def _state(self) -> tuple[int, float] | None:
        return self.serving.side.norm_part()

    def _message(self, shard: int, generation: int, number: int) -> m.Message:
        return m.NormPart(shard, generation, *self._told)

    def on_total(self, message: m.NormTotal) -> None:
        if self._is_open:
            self.serving.parameters.norm_known(message.clock, message.squared)
