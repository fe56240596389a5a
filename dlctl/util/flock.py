"""Locks of files that other processes may inspect: these hold the lock for a moment only."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from threading import Event

from dlctl.util import regular

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


def is_locked(path: Path) -> bool:
    """Whether a process has locked this file. Raises OSError."""
    descriptor = regular.descriptor(path, os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # Closing the descriptor unlocks.
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
