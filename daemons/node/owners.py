"""Who has a port of this machine, as far as this user may know it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil


def owner_of(port: int) -> dict[str, Any]:
    """{pid, command} of the process that listens there; {} if nobody says."""
    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            is_it = found.status == psutil.CONN_LISTEN and found.laddr.port == port
            if is_it and found.pid is not None:
                process = psutil.Process(found.pid)
                return {"pid": found.pid, "command": process.cmdline() or [process.name()]}
    return {}
