"""The task, model and data of a job, loaded as every process does it that computes gradients."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from daemons.worker.data import PortionLoader
from daemons.worker.first_calls import make_first_calls
from daemons.worker.replica import Replica, choose_device
from daemons.worker.task import load_task
from dlctl.config import JobFile
from dlctl.util import cores


class Built(NamedTuple):
    replica: Replica
    loader: PortionLoader
    samples: int
    """Of the whole dataset."""


def build(job: JobFile, slot: int, processes: int) -> Built:
    """Load the task of a job; sets the number of torch's threads.

    slot: the worker's, which spreads workers over GPUs. processes: that load the data; 0: none.
    Raises TaskError for what is wrong with the task, DlctlError if there is no such device.
    """
    workers = job.workers
    torch.set_num_threads(workers.threads or _fair_share(workers.count))
    make_first_calls()
    task = load_task(job.job.task, Path(job.job.task.rpartition(":")[0]).parent)
    device = choose_device(workers.device, slot)
    replica = Replica(task, device=str(device), seed=job.job.seed)
    replica.check_finite()
    dataset = task.dataset()
    loader = PortionLoader(
        dataset,
        batch_size=workers.batch_size,
        seed=job.job.seed,
        shuffle=job.data.shuffle,
        processes=processes,
        collate=task.collate,
    )
    return Built(replica, loader, len(dataset))


def _fair_share(workers: int) -> int:
    """Threads of torch for each of the workers on this machine."""
    return max(1, cores.usable() // workers)
