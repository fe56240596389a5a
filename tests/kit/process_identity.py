"""Which process is meant: what a run's database says of one that is there."""

from __future__ import annotations

import os
from typing import Any

from dlctl.util import processes


def identity(pid: int) -> dict[str, Any]:
    """Of a process that lives, or whose end has not been collected yet."""
    start = processes.start_of(pid)
    assert start is not None
    return {"pid": pid, "pid_start": start}


ME = identity(os.getpid())
OF_ANOTHER_BOOT = "00000000-0000-0000-0000-000000000000:1000"
"""The start of a process that had its pid before the machine was started again."""
