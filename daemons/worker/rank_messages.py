"""What the ranks of one replica say to each other: a JSON header, and the bytes of its arrays.

To a rank: "begin" (slot, epoch, ranks, store, memory), "meet" (limit_s, device), and then calls:
"run" (op), "state", "restore" (names) of an engine; or "cut", "step", "work", "buffers", "state",
"restore" of its part of a replica (`cut_replica.py`); or to one alone "batch" (`hogwild_ranks.py`).
From it: "alive" once a second, "at" (step, and what comes of the call), "failed" (error, detail).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from dlctl.messages import Array

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
