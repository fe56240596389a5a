"""Messages that are allowed but useless, above all duplicate pushes.

Every worker resends lost messages, a few per second. A sender that floods the server with
duplicates is muted for a moment, so that other workers are served: its messages are discarded
unread.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlctl.machine import Hush
from dlctl.roles.protocol.context import Context

PER_S, BURST = 100.0, 1000.0
"""Useless messages of one key that are tolerated: sustained rate, and burst."""
HUSH_S = 2.0
SAY_S = 60.0


@dataclass(slots=True)
class _Patience:
    left: float
    at: float
    """Time of that value of `left`."""
    say_at: float


class AbuseGuard:
    def __init__(self, context: Context) -> None:
        self.context = context
        self._patience: dict[str, _Patience] = {}

    def add(self, identity: str, now: float) -> None:
        """One more useless message of `identity` ("": no keys; then it is this user)."""
        if not identity:
            return
        found = self._patience.setdefault(identity, _Patience(BURST, now, now))
        found.left = min(BURST, found.left + (now - found.at) * PER_S) - 1.0
        found.at = now
        if found.left > 0.0:
            return
        self.context.do(Hush(identity, HUSH_S))
        if now >= found.say_at:
            found.say_at = now + SAY_S
            text = f"{identity} sends too many duplicates: its messages are discarded at times"
            self.context.note("warning", text)
