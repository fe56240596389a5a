"""torch.distributed between the ranks of one replica, as the default group of each process."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from dlctl.messages import Array

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


BUILT, MET = 1, 2
"""The steps of a rank: its model is built; it is in the group and has its engine. Every call is one
more.
"""
ALIVE_S = 1.0


class Said(NamedTuple):
    kind: str
    header: dict[str, Any]
    arrays: tuple[Array, ...]


def send(link: Connection, kind: str, arrays: Sequence[Array] = (), **header: Any) -> None:
    """Raises OSError if nobody is there any more."""
    forms = [(array.dtype.str, array.shape) for array in arrays]
    link.send_bytes(json.dumps([kind, header, forms]).encode())
    for array in arrays:
        link.send_bytes(_bytes_of(np.ascontiguousarray(array)))


def receive(link: Connection) -> Said:
    """Raises EOFError or OSError if nobody is there any more."""
    kind, header, forms = json.loads(link.recv_bytes())
    arrays = []
    for dtype, shape in forms:
        array = np.empty(shape, dtype)
        link.recv_bytes_into(_bytes_of(array))
        arrays.append(array)
    return Said(kind, header, tuple(arrays))


def _bytes_of(array: Array) -> Any:
    """The memory of an array that is in one piece."""
    return array.reshape(-1).view(np.uint8)
