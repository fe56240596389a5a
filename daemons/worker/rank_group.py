"""torch.distributed between the ranks of one replica, as the default group of each process."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

OPERATION_S = 1800.0
"""For a collective. A rank that dies ends it at once, one that is silent after `silent_s`."""
INTERFACE = "GLOO_SOCKET_IFNAME"


def join_group(store: int, rank: int, ranks: int, within_s: float) -> Any:
    """The group, when all ranks are in it. store: a file without a name that all of them have open.

    Raises RuntimeError if they are not there in time.
    """
    file = dist.FileStore(f"/proc/self/fd/{store}", ranks)  # type: ignore[attr-defined]
    before, hook = os.environ.get(INTERFACE), sys.excepthook
    os.environ[INTERFACE] = _loopback()
    try:
        dist.init_process_group(
            "gloo",
            store=file,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=within_s),
        )
    finally:
        sys.excepthook = hook  # It would put a name of its own before every line.
        del os.environ[INTERFACE]
        if before is not None:
            os.environ[INTERFACE] = before
    group = dist.group.WORLD
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=OPERATION_S), group)
    return group


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return names[0] if names else "lo"
