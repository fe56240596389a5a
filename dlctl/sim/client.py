"""A command of the command line, in virtual time: one request, repeated until it is answered."""

from __future__ import annotations

from dlctl.roles.protocol.context import COORDINATOR
from dlctl.wire.machine import DeadlineReached, Effect, Event, Exit, Received, Send, Started
from dlctl.wire.messages import Json, Reply, Request

REPEAT_S = 1.0
PATIENCE_S = 60.0
"""Time to wait for an answer: the run may have ended before it could answer."""


class Client:
    """Asks once a second; `reply` is the newest answer, final once `reply.done`."""

    def __init__(self, number: int, verb: str, arguments: Json) -> None:
        self.request = Request(number, verb, arguments)
        self.reply: Reply | None = None
        self._ask_at = 0.0
        self._until: float | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, (Started, DeadlineReached)):
            if self._until is None:
                self._until = now + PATIENCE_S
            elif now >= self._until:
                return [Exit(1, "no answer came")]
            self._ask_at = now + REPEAT_S
            return [Send(COORDINATOR, self.request)]
        if isinstance(event, Received) and isinstance(event.message, Reply):
            self.reply = event.message
            if self.reply.done:
                return [Exit(0, "answered")]
        return []

    def deadline(self) -> float | None:
        return self._ask_at
