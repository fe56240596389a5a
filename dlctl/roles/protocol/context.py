"""Shared by the parts of a role: the effects of the current event, and unanswered messages."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from dlctl.errors import DlctlError
from dlctl.roles.protocol.retry import Retries
from dlctl.util.names import COORDINATOR as COORDINATOR
from dlctl.wire.machine import Effect, Note, Send
from dlctl.wire.messages import Failed, Message

REPORT_S = 1.0
"""Interval between two reports (heartbeats) of a daemon."""
EXIT_FENCED = 75
"""The process found that another one has replaced it."""
EXIT_POISONED = 79
"""The worker's results are unusable: it must not be replaced automatically. Distinct from exit
codes of commands, such as 77 (`dlctl.errors`), since people read both; `dlctl.text` has the words.
"""
EXIT_RESTART = 76
"""The coordinator requests its restart; its run continues meanwhile."""


class Context:
    def __init__(self, resend_s: float) -> None:
        self.retries = Retries(resend_s)
        self._effects: list[Effect] = []

    def do(self, *effects: Effect) -> None:
        self._effects += effects

    def send(self, peer: str | bytes, message: Message) -> None:
        """Send once: for periodic messages, or answers to requests that are resent."""
        self._effects.append(Send(peer, message))

    def ask(self, key: Hashable, peer: str, message: Message, now: float, nbytes: int = 0) -> None:
        """Send and resend until `retries.done(key)`."""
        self._effects.append(self.retries.add(key, peer, message, now, nbytes))

    def noted(self, key: Hashable, now: float, **fields: Any) -> None:
        """The peer has acknowledged the message under `key`, if these are its fields and not those
        of an older one.
        """
        newest = self.retries.message(key)
        if newest is not None and all(getattr(newest, k, None) == v for k, v in fields.items()):
            self.retries.done(key, now)

    def fail(
        self, name: str, error: DlctlError, hint: str | None = None, *, is_fatal: bool = True
    ) -> str:
        """Report to the coordinator why this daemon cannot continue; fatal: a replacement could not
        either. Returns the message."""
        words = "; ".join(filter(None, (error.message, hint or error.hint)))
        self.send(COORDINATOR, Failed(name, words, error.where or "", is_fatal))
        self.note("error", words, where=error.where)
        return words

    def note(self, level: str, text: str, **fields: Any) -> None:
        self._effects.append(Note(level, text, fields))

    def clear(self) -> list[Effect]:
        """Take the effects of this event, in order."""
        effects, self._effects = self._effects, []
        return effects
