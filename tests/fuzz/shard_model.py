"""What both kinds of kept states are of, and what must hold for one that was opened."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import msgpack
import numpy as np

from dlctl.compress.base import Delta
from dlctl.optim.adam import Adam
from dlctl.shards.base import Extras, Shard, Spec

from . import trees

MEMORY_BYTES = 40_000_000
"""msgpack makes room for a list before it has read it: 33 MB at most. What a checksum covers was
written by a server, so nobody counts these bytes.
"""
SIZE = 200
BOOT = "the present boot"


def adam() -> Adam:
    """The optimiser with counters and two slots."""
    return Adam(Adam.Options(lr=0.5))


SPEC = Spec("run-1", 0, 10, 10 + SIZE, adam().slots, averaged=2, workers=2)


def begin(shard: Shard) -> None:
    """First values, committed."""
    extras = Extras(np.array([1.0, 2.0]))
    shard.storage.fill({"w": np.linspace(-1, 1, SIZE, dtype=np.float32)}, extras)
    shard.commit({"initialised": True, "deliveries": []})


def dense() -> Delta:
    return Delta(np.linspace(1, 2, SIZE, dtype=np.float32))


def sparse() -> Delta:
    return Delta(np.ones(3, np.float32), np.array([2, 3, 60]))


def train(shard: Shard, *deltas: Delta) -> None:
    """A commit for each update."""
    for number, delta in enumerate(deltas, 1):
        shard.apply(delta)
        shard.commit({"initialised": True, "deliveries": [[0, 1, number]]})


def snapshot(shard: Shard) -> dict[str, Any]:
    """Everything that a shard consists of, to be compared to the last bit."""
    vectors = {"w": shard.w, **shard.slots}
    extras = shard.storage.extras
    return {
        "vectors": {name: array.tobytes() for name, array in vectors.items()},
        "extras": extras.averaged.tobytes(),
        "version": shard.version,
        "lr": shard.optimizer.lr,
        "counters": dict(shard.optimizer.counters),
    }


def check_opened(shard: Shard, meta: Any) -> None:
    """What the next server gets is of the kinds that it counts on."""
    assert isinstance(meta, dict)
    assert type(shard.version) is int
    assert shard.version >= 0
    assert math.isfinite(shard.optimizer.lr)
    updates = shard.optimizer.counters["updates"]
    assert type(updates) is int
    assert updates >= 0
    for array in (shard.w, *shard.slots.values()):
        assert array.dtype == np.float32
        assert array.shape == (SIZE,)


def change_body(random: Random, body: bytes, other: bytes) -> bytes:
    """Another body for a record or commit: msgpack whose meaning has changed."""
    tree = msgpack.unpackb(body, strict_map_key=False)
    changed = trees.mutate(random, tree, msgpack.unpackb(other, strict_map_key=False))
    packed = msgpack.packb(changed, unicode_errors="surrogatepass")
    return trees.deep_msgpack(random, packed)
