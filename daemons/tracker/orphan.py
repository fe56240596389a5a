"""Ends a tracker's process a while after its coordinator, whatever its package is waiting for."""

from __future__ import annotations

import os
import threading

from dlctl.observe.delivery import BEGIN_S

LEAVE_S = 10.0
"""Time to deliver what has come when the coordinator is gone."""
LOOK_S = 0.5


def watch(coordinator: int) -> threading.Event:
    """Watch the process with this pid, which has started this one. Returns the event to set once
    the tracker has begun: a database that a package is making may be broken if it is not finished.

    The pid is given: who asks for that of its parent may already be told another one's.
    """
    has_begun = threading.Event()
    threading.Thread(target=_end_without, args=(coordinator, has_begun), daemon=True).start()
    return has_begun


def _end_without(coordinator: int, has_begun: threading.Event) -> None:
    never = threading.Event()
    while os.getppid() == coordinator:
        never.wait(LOOK_S)
    has_begun.wait(BEGIN_S)
    never.wait(LEAVE_S)
    os._exit(1)
