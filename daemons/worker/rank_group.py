"""torch.distributed between the ranks of one replica, as the default group of each process."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

OPERATION_S = 1800.0
"""For a collective. A rank that dies ends it at once, one that is silent after `silent_s`."""
INTERFACE = "GLOO_SOCKET_IFNAME"


def join_group(store: int, rank: int, ranks: int, within_s: float, device: str = "cpu") -> Any:
    """The group, when all ranks are in it. store: a file without a name that all of them have open.
    device: of tensors that it takes; those on the CPU in any case.

    Raises RuntimeError if they are not there in time.
    """
    file = dist.FileStore(f"/proc/self/fd/{store}", ranks)  # type: ignore[attr-defined]
    hook = sys.excepthook
    try:
        with on_loopback():
            dist.init_process_group(
                "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
                store=file,
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=within_s),
            )
    finally:
        sys.excepthook = hook  # It would put a name of its own before every line.
    group = dist.group.WORLD
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=OPERATION_S), group)
    return group


@contextmanager
def on_loopback() -> Iterator[None]:
    """Groups that are made within this have their traffic there."""
    before = os.environ.get(INTERFACE)
    os.environ[INTERFACE] = _loopback()
    try:
        yield
    finally:
        del os.environ[INTERFACE]
        if before is not None:
            os.environ[INTERFACE] = before


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return names[0] if names else "lo"
