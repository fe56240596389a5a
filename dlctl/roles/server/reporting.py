"""State that a server reports to the coordinator until it is acted on: the pushes that it holds,
for the lead to decide on, and its part of a norm by which all shards clip.

Each message contains the whole state, so a lost one costs only time: it is resent after `resend_s`,
and then less often, as long as nothing changes. This also covers a new coordinator, and one that
waits for the other shards.
"""

from __future__ import annotations

from typing import Any

from dlctl import messages as m
from dlctl.algorithms.base import Decision
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.rows import packed, rows_in
from dlctl.roles.server.shard_protocol import ShardProtocol

PAUSE_MAX = 4
"""Maximum pause between two equal messages, as a multiple of `resend_s`."""


class Reporting:
    def __init__(self, context: Context, serving: ShardProtocol) -> None:
        self.context = context
        self.serving = serving
        self._sent: Any = None
        self._number = 0
        self._pause_s = 0.0
        self._due_at: float | None = None

    @property
    def _is_open(self) -> bool:
        """False for a shard that is closed, or has no values yet: it takes part in nothing."""
        return self.serving.initialised and not self.serving.last_checkpoint

    def _state(self) -> Any:
        """The state to report; None: nothing."""
        raise NotImplementedError

    def _message(self, shard: int, generation: int, number: int) -> m.Message:
        """`_sent` as a message; number: counts the changes of the state."""
        raise NotImplementedError

    def report_if_due(self, now: float) -> None:
        """Send a state that has changed, or that was not sent for a while."""
        state = self._state() if self._is_open else None
        if state is None:
            self._sent = self._due_at = None
            return
        resend_s = self.context.retries.resend_s
        if state != self._sent:
            self._sent, self._pause_s = state, resend_s
            self._number += 1
        elif self._due_at is not None and now < self._due_at:
            return
        else:
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX * resend_s)
        self._due_at = now + self._pause_s
        of = (self.serving.index, self.serving.generation, self._number)
        self.context.send(COORDINATOR, self._message(*of))

    def report_again(self, now: float) -> None:
        """Resend: the last message may be lost, or the coordinator is a new one."""
        self._due_at = now

    def deadline(self) -> float | None:
        return self._due_at


class AsksLead(Reporting):
    """Reports the shard's step, which shows the coordinator that a decision was executed, and the
    pushes that it holds.
    """

    def _state(self) -> tuple[int, list[tuple[int, int, int, int]]]:
        return self.serving.shard.version, self.serving.side.held()

    def _message(self, shard: int, generation: int, number: int) -> m.Message:
        clock, pushes = self._sent
        return m.Holding(shard, generation, number, clock, packed(pushes))

    def on_decided(self, message: m.Decided) -> None:
        """Raises RemoteProtocolError."""
        if self._is_open:
            used, gone = (
                frozenset((slot, epoch) for slot, epoch in rows_in(numbers, 2))
                for numbers in (message.used, message.gone)
            )
            self.serving.parameters.decided(Decision(message.clock, used, gone))


class SharesNorm(Reporting):
    """Reports the square of the norm of this shard's part of a step."""

    def _state(self) -> tuple[int, float] | None:
        return self.serving.side.norm_part()

    def _message(self, shard: int, generation: int, number: int) -> m.Message:
        return m.NormPart(shard, generation, *self._sent)

    def on_total(self, message: m.NormTotal) -> None:
        if self._is_open:
            self.serving.parameters.norm_known(message.clock, message.squared)
