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

from dlctl.wire.messages import Array

OPERATION_S = 1800.0
"""Timeout of a collective. The death of a rank ends it at once, a silent rank after `silent_s`."""
INTERFACE = "GLOO_SOCKET_IFNAME"


def join_group(store: int, rank: int, ranks: int, within_s: float, device: str = "cpu") -> Any:
    """The group, once all ranks have joined. store: an anonymous file (memfd) that all of them have
    open. device: of the tensors that it takes, besides those on the CPU.

    Raises RuntimeError if a rank does not join in time.
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
        sys.excepthook = hook  # torch's hook would prefix every line with the rank.
    group = dist.group.WORLD
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=OPERATION_S), group)
    return group


@contextmanager
def on_loopback() -> Iterator[None]:
    """Groups created within this use the loopback."""
    before = os.environ.get(INTERFACE)
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ[INTERFACE] = names[0] if names else "lo"
    try:
        yield
    finally:
        del os.environ[INTERFACE]
        if before is not None:
            os.environ[INTERFACE] = before


BUILT, MET = 1, 2
"""The steps of a rank: its model is built; it has joined the group and has its engine. Every call
adds one.
"""
ALIVE_S = 1.0
"""Interval between heartbeats."""


class RankMessage(NamedTuple):
    kind: str
    header: dict[str, Any]
    arrays: tuple[Array, ...]


def send(link: Connection, kind: str, arrays: Sequence[Array] = (), **header: Any) -> None:
    """Send a message to a rank. Raises OSError if the process has exited."""
    forms = [(array.dtype.str, array.shape) for array in arrays]
    link.send_bytes(json.dumps([kind, header, forms]).encode())
    for array in arrays:
        link.send_bytes(_bytes_of(np.ascontiguousarray(array)))


def receive(link: Connection) -> RankMessage:
    """Receive a rank's message. Raises EOFError or OSError if the process has exited."""
    kind, header, forms = json.loads(link.recv_bytes())
    arrays = []
    for dtype, shape in forms:
        array = np.empty(shape, dtype)
        link.recv_bytes_into(_bytes_of(array))
        arrays.append(array)
    return RankMessage(kind, header, tuple(arrays))


def _bytes_of(array: Array) -> Any:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8)
