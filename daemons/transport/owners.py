"""The process that listens at a port of this machine, if this user may see it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil


def owner_of(port: int) -> dict[str, Any]:
    """{pid, command} of the process that listens at the port; {} if unknown."""
    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            is_it = found.status == psutil.CONN_LISTEN and found.laddr.port == port
            if is_it and found.pid is not None:
                process = psutil.Process(found.pid)
                return {"pid": found.pid, "command": process.cmdline() or [process.name()]}
    return {}
