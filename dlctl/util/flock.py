"""Locks of files that other processes may inspect: these hold the lock for a moment only."""

from __future__ import annotations

import fcntl
import time
from threading import Event

GLANCE_S = 0.5
"""A process that only inspects holds the lock for less than this."""
RETRY_S = 0.05


def is_locked_within(limit_s: float, descriptor: int) -> bool:
    """Lock an open file exclusively; False if another process holds the lock for all that time."""
    until = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            Event().wait(RETRY_S)
        else:
            return True
