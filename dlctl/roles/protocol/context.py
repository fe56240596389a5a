"""What the parts of a role share: the effects of the present event, and the unanswered messages."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from dlctl.errors import DlctlError
from dlctl.machine import Effect, Note, Send
from dlctl.messages import Change, Changed, Failed, Json, Message, Register
from dlctl.roles.protocol.retry import Retries
from dlctl.util.names import COORDINATOR as COORDINATOR

REPORT_S = 1.0
"""Between two reports of a daemon."""
EXIT_FENCED = 75
"""A process that found out that another one has taken its place."""
EXIT_POISONED = 79
"""A worker that computes nothing that can be used: it is not to be replaced by itself. No exit code
of a command, as 77 is (`dlctl.errors`), for people read both; `dlctl.text` has the words."""
EXIT_RESTART = 76
"""A coordinator that wants to be started again; its run goes on meanwhile."""


@dataclass(frozen=True, slots=True)
class Birth:
    """What a daemon knows about itself when it starts."""

    run_id: str
    role: str
    name: str
    incarnation: int
    pid: int
    host: str
    version: str

    def register(self) -> Register:
        return Register(
            self.run_id, self.role, self.name, self.incarnation, self.pid, self.host, self.version
        )


class Context:
    def __init__(self, resend_s: float) -> None:
        self.retries = Retries(resend_s)
        self._others: list[Retries] = []
        self._effects: list[Effect] = []

    def do(self, *effects: Effect) -> None:
        self._effects += effects

    def send(self, peer: str | bytes, message: Message) -> None:
        """Send once; for what is repeated anyway, or answers a repeated question."""
        self._effects.append(Send(peer, message))

    def ask(self, key: Hashable, peer: str, message: Message, now: float, nbytes: int = 0) -> None:
        """Send until `retries.done(key)`."""
        self._effects.append(self.retries.add(key, peer, message, now, nbytes))

    def noted(self, key: Hashable, now: float, **fields: Any) -> None:
        """The peer has what was sent under `key`, if these are its fields: nothing older."""
        newest = self.retries.message(key)
        if newest is not None and all(getattr(newest, k, None) == v for k, v in fields.items()):
            self.retries.done(key, now)

    def measures_apart(self) -> Retries:
        """Another one for messages whose answers say nothing about how soon a word is answered."""
        self._others.append(Retries(self.retries.resend_s))
        return self._others[-1]

    @property
    def repeated(self) -> int:
        """Messages that were sent again so far."""
        return sum(outstanding.repeated for outstanding in (self.retries, *self._others))

    def again(self, peer: str, lost_at: float, now: float) -> None:
        """What was sent to this peer until then is lost with its connection: it is due now."""
        for outstanding in (self.retries, *self._others):
            outstanding.again(peer, lost_at, now)

    def answer_change(self, change: Change, name: str, before: Json, after: Json) -> None:
        """Tell the coordinator what the keys of a change were and are; others are not ours."""
        keys = [key for key in change.settings if key in before]
        was, now_is = {k: before[k] for k in keys}, {k: after[k] for k in keys}
        self.send(COORDINATOR, Changed(change.change, name, was, now_is))

    def fail(
        self, name: str, error: DlctlError, hint: str | None = None, *, is_fatal: bool = True
    ) -> str:
        """Tell the coordinator why this daemon cannot go on; fatal: nor can another process in its
        place. Returns the words."""
        words = "; ".join(filter(None, (error.message, hint or error.hint)))
        self.send(COORDINATOR, Failed(name, words, error.where or "", is_fatal))
        self.note("error", words, where=error.where)
        return words

    def note(self, level: str, text: str, **fields: Any) -> None:
        self._effects.append(Note(level, text, fields))

    def clear(self) -> list[Effect]:
        """The effects of this event, in order."""
        effects, self._effects = self._effects, []
        return effects
