"""Messages that are allowed but useless, above all duplicate pushes.

Every worker resends lost messages, a few per second. A sender that floods the server with
duplicates is muted for a moment, so that other workers are served: its messages are discarded
unread.
"""

from __future__ import annotations

from collections import Counter

from dlctl.roles.protocol.context import Context
from dlctl.wire.machine import Mute

USELESS_MAX, WINDOW_S = 1000, 10.0
"""Useless messages of one key that are tolerated in a window of this length."""
MUTE_S = 2.0


class AbuseGuard:
    def __init__(self, context: Context) -> None:
        self.context = context
        self._useless: Counter[str] = Counter()
        """Useless messages per key in this window."""
        self._ends_at = 0.0

    def add(self, identity: str, now: float) -> None:
        """One more useless message of `identity` ("": no keys; then it is this user)."""
        if not identity:
            return
        if now >= self._ends_at:
            self._useless.clear()
            self._ends_at = now + WINDOW_S
        self._useless[identity] += 1
        if self._useless[identity] >= USELESS_MAX:
            self.context.do(Mute(identity, MUTE_S))
        if self._useless[identity] == USELESS_MAX:
            text = f"{identity} sends too many duplicates: its messages are discarded at times"
            self.context.note("warning", text)
