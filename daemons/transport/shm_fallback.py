"""Who looks in vain for what lies in shared memory: then messages are sent to it for a while.

/proc may be closed where a receiver lives, or it takes so long that slots are given up before it
looks; others find what is lent to them all the same. So each receiver is judged by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from typing import NamedTuple

MISSES_MAX = 3
"""After so many in a row there is a pause."""
PAUSE_S = 600.0
RECEIVERS_MAX = 256
"""So many are remembered: connections come and go."""

log = logging.getLogger(__name__)


class _Missed(NamedTuple):
    times: int
    """In a row."""
    at: float
    """The newest of them."""


class ShmFallback:
    """Those who have found everything, or have not missed anything for `PAUSE_S`, are not kept."""

    def __init__(self) -> None:
        self._of: dict[Hashable, _Missed] = {}
        """The oldest first."""

    def is_paused(self, receiver: Hashable) -> bool:
        """Whether nothing is to be lent to it now."""
        missed = self._of.get(receiver)
        if missed is None or missed.times < MISSES_MAX:
            return False
        return time.monotonic() < missed.at + PAUSE_S

    def found(self, receiver: Hashable) -> None:
        """What was lent to it has come back. During a pause that is of before."""
        if not self.is_paused(receiver):
            self._of.pop(receiver, None)

    def add(self, receiver: Hashable) -> None:
        """It says that it has not found something."""
        self.check()
        before = self._of.pop(receiver, None)
        times = 1 + (before.times if before is not None else 0)
        self._of[receiver] = _Missed(times, time.monotonic())
        if times == MISSES_MAX:
            who = receiver if isinstance(receiver, str) else "a peer"
            log.warning(
                "%s does not find what lies in shared memory; it is sent for %.0f s", who, PAUSE_S
            )
        while len(self._of) > RECEIVERS_MAX:
            del self._of[next(iter(self._of))]

    def check(self) -> None:
        """A chore: forget whose last miss is long ago."""
        oldest = time.monotonic() - PAUSE_S
        while self._of:
            receiver, missed = next(iter(self._of.items()))
            if missed.at > oldest:
                return
            del self._of[receiver]
