"""Joining the processes of torch.distributed over gloo."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.settings import Settings
from benchmarks.peers.watch import Watch


def join(settings: Settings) -> None:
    """Returns when all workers have joined."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{settings.address}:{settings.port}",
        rank=settings.rank,
        world_size=settings.workers,
    )


def train(settings: Settings, step: Callable[[], None], parameters: Callable[[], Tensor]) -> None:
    """Make steps, all workers together, until rank 0 has finished; the others are then terminated.

    parameters: float32[d], those of rank 0.
    """
    watch = Watch(settings, all_wait=True) if settings.rank == 0 else None
    dist.barrier()
    if watch is None:
        while True:
            step()
    watch.start()
    steps = 0
    while not watch.is_enough(parameters, steps * settings.workers):
        step()
        steps += 1
    watch.write()
