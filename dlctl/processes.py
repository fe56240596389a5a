"""Is that process still there? Processes are known by pid and time of creation, never by name.

A pid alone is not an identity: the kernel gives it to somebody else after a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CREATED_TOLERANCE_S = 2.0
"""Two readings of one creation time differ when the clock was set in between."""


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


def end(rows: Iterable[Mapping[str, Any]], grace_s: float) -> tuple[list[str], list[str]]:
    """End the processes of these rows: SIGTERM, and SIGKILL after `grace_s` seconds.

    Returns (names that ended, names that could not be ended). Only processes whose pid and
    creation time are the recorded ones are touched.
    """
    import psutil

    found = {row["name"]: find(row.get("pid"), row.get("pid_created")) for row in rows}
    there = {name: process for name, process in found.items() if process is not None}
    refused = {name for name, process in there.items() if not _signal(process, "terminate")}
    _, left = psutil.wait_procs(list(there.values()), timeout=grace_s)
    for process in left:
        _signal(process, "kill")
    psutil.wait_procs(left, timeout=5)
    still = [name for name, p in there.items() if name in refused or _is_running(p)]
    return [name for name in there if name not in still], still


def _signal(process: Any, method: str) -> bool:
    import psutil

    try:
        getattr(process, method)()
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
    return True


def _is_running(process: Any) -> bool:
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
