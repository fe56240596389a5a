"""Locks of files at which others may glance: they have them for a moment, and not for good."""

from __future__ import annotations

import fcntl
import time
from threading import Event

GLANCE_S = 0.5
"""Who only looks has the lock for less than that."""
RETRY_S = 0.05


def is_locked_within(limit_s: float, descriptor: int) -> bool:
    """Lock an open file for us alone; False if somebody else has it for all that time."""
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
