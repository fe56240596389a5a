"""Is that process still there? Processes are known by pid and time of creation, never by name.

A pid alone is not an identity: the kernel gives it to somebody else after a while.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

CREATED_TOLERANCE_S = 2.0
"""Two readings of one creation time differ when the clock was set in between."""
POLL_S = 0.02
KILL_S = 5.0
"""For the kernel to end a process that was killed; one in a bad disk's hands may take longer."""


def find(pid: Any, created: Any) -> Any:
    """The `psutil.Process` with this pid and creation time (seconds since 1970), or None.

    A zombie counts as gone. Values of another type (None, text) are nobody's.
    """
    import psutil

    if type(pid) is not int or pid <= 0 or type(created) not in (int, float):
        return None
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) <= CREATED_TOLERANCE_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def is_alive(pid: Any, created: Any) -> bool:
    return find(pid, created) is not None


def living(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of the rows (with `pid` and `pid_created`) whose process is still there."""
    return [row for row in rows if is_alive(row.get("pid"), row.get("pid_created"))]


def wait(rows: Iterable[Mapping[str, Any]], timeout_s: float) -> list[Mapping[str, Any]]:
    """Wait until the processes of these rows have ended; returns the rows of those that have not.

    A zombie has ended, whenever its parent may find time for it.
    """
    deadline = time.monotonic() + timeout_s
    left = living(rows)
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = living(left)
    return left


def end(rows: Iterable[Mapping[str, Any]], grace_s: float) -> tuple[list[str], list[str]]:
    """End the processes of these rows: SIGTERM, and SIGKILL after `grace_s` seconds.

    Returns (names that ended, names that could not be ended). Only processes whose pid and
    creation time are the recorded ones are touched.
    """
    there = living(rows)
    refused = [row for row in there if not _signal(row, "terminate")]
    for row in wait([row for row in there if row not in refused], grace_s):
        _signal(row, "kill")
    still = {row["name"] for row in wait(there, KILL_S)}
    return [row["name"] for row in there if row["name"] not in still], sorted(still)


def _signal(row: Mapping[str, Any], method: str) -> bool:
    """False if this process is not ours to signal."""
    import psutil

    process = find(row.get("pid"), row.get("pid_created"))
    try:
        if process is not None:
            getattr(process, method)()
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
    return True
