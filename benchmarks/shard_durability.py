"""The cost of shards that survive their server: durability "process" against "none".

First the update alone, with its commit, in this process; then a whole push to a real server until
its ack. Both sides alternate on the same deltas. The final state of both servers is checked
(replay.py).
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np

from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.replay import Replay, Vector
from benchmarks.sandbox import sandbox
from benchmarks.shard import shard
from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.shards.base import Shard, Spec
from dlctl.shards.image import ImageForm
from dlctl.shards.mapped import Mapped
from dlctl.shards.memory import InMemory
from dlctl.wire.messages import Packed

CHAPTER = "shard_durability"
SIZES = (1_000_000, 10_000_000)
OPTIMIZERS = ("sgd", "adagrad")
NETWORKS = ("ipc", "tcp")
"""Shared memory, and sockets without encryption."""
KINDS = {"none": ("dense", 1.15), "topk": ("sparse 1 %", 1.1)}
"""Compressor -> (its name in the table, the target ratio of pushes)."""
META = {
    "initialised": True,
    "deliveries": [[slot, 1, 100] for slot in range(8)],
    "refused": [],
    "side": {},
}
"""As a server with eight workers commits it."""
BOOT_ID = "this boot"


def measure(*, quick: bool) -> list[Figure]:
    sizes = (10_000,) if quick else SIZES
    figures = [
        figure
        for size in sizes
        for optimizer in OPTIMIZERS
        for figure in _apply_alone(size, optimizer, quick)
    ]
    for case in itertools.product(NETWORKS, sizes, OPTIMIZERS, KINDS):
        figures.append(_end_to_end(*case, quick))
    return figures


def _apply_alone(size: int, optimizer: str, quick: bool) -> Iterator[Figure]:
    kind = registry.load("optimizers", optimizer)
    spec = Spec("bench", 0, 0, size, kind(kind.Options()).slots, workers=8)
    bare = Shard(kind(kind.Options()), InMemory().create(spec))
    form = ImageForm.of(spec, BOOT_ID)
    buffer = mmap.mmap(-1, form.total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    kept = Shard(kind(kind.Options()), Mapped.create(buffer, spec, BOOT_ID))
    for compressor, (name, _) in KINDS.items():
        delta = _delta(size, compressor)
        rounds, repeats = (1, 2) if quick else (15, 10 if compressor == "none" else 50)
        ours, without = partial(_update, kept, delta), partial(_update, bare, delta)
        ours_s, bare_s = take_turns(rounds, ours, without, repeats)
        what = f"apply {name}, {optimizer}, {size:,} / in memory"
        yield ratio(CHAPTER, what, ours_s, bare_s, None)


def _update(shard: Shard, delta: Delta) -> None:
    shard.apply(delta)
    shard.commit(META)


def _delta(size: int, compressor: str) -> Delta:
    packed, _ = _packed(size, compressor)
    delta: Delta = registry.load("compressors", compressor).expand(packed, size)
    return delta


def _packed(size: int, compressor: str) -> tuple[Packed, Vector]:
    """A push, and its values: float32[size], zero where nothing is sent."""
    kind = registry.load("compressors", compressor)
    gradient = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    whole = gradient.copy()
    packed: Packed = kind(kind.Options()).take(gradient)
    return packed, whole - gradient  # The residual is what was not sent.


def _end_to_end(network: str, size: int, optimizer: str, compressor: str, quick: bool) -> Figure:
    """A push by one worker, from sending to its ack."""
    name, asked = KINDS[compressor]
    what = f'push {name}, {network}, {optimizer}, {size:,} / durability "none"'
    packed, pushed = _packed(size, compressor)
    rounds, repeats = (1, 2) if quick else (15, 10 if size > 10**6 else 50)
    with sandbox() as directory, ExitStack() as stack:
        kept, bare = (
            stack.enter_context(
                shard(directory, network, size, optimizer, compressor, durability=durability)
            )
            for durability in ("process", "none")
        )
        ours_s, bare_s = take_turns(
            rounds, lambda: kept.push(packed), lambda: bare.push(packed), repeats
        )
        for worker in (kept, bare):
            replay = Replay(f"{CHAPTER}: {what}", optimizer, size)
            replay.push(pushed, times=worker.pushes)
            replay.compare(worker.fetch(), worker.version)
    return ratio(CHAPTER, what, ours_s, bare_s, asked)
