"""Who has a port of this machine, as far as this user may know it."""

from __future__ import annotations

from typing import Any

import psutil


def owner_of(port: int) -> dict[str, Any]:
    """{pid, command} of the process that listens there; {} if nobody says."""
    try:
        listening = [
            found for found in psutil.net_connections("tcp") if found.status == psutil.CONN_LISTEN
        ]
    except (psutil.Error, OSError):
        return {}
    pids = {found.pid for found in listening if found.laddr and found.laddr.port == port} - {None}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            return {"pid": pid, "command": process.cmdline() or [process.name()]}
        except psutil.Error:
            continue
    return {}
