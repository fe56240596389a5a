"""Hogwild: processes that make SGD steps on the same parameters in shared memory, without a lock.

As in the example mnist_hogwild of torch. One machine only.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import multiprocessing, nn

from benchmarks.peers.settings import Settings, from_command_line
from benchmarks.peers.watch import Watch
from benchmarks.peers.work import batches, data_of, loss_of, model_of, vector_of

LOOK_S = 0.01


def main(settings: Settings) -> None:
    processes = multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    data_of(settings.work)
    model = model_of(settings.work).share_memory()
    steps = torch.zeros(settings.workers, dtype=torch.int64).share_memory_()
    ready = processes.Barrier(settings.workers + 1)
    watch = Watch(settings, all_wait=False)
    workers = [
        processes.Process(target=_work, args=(settings, i, model, steps, ready), daemon=True)
        for i in range(settings.workers)
    ]
    try:
        for worker in workers:
            worker.start()
        ready.wait()
        watch.start()
        while not watch.is_enough(lambda: vector_of(model), int(steps.sum())):
            time.sleep(LOOK_S)
    finally:
        for worker in workers:
            worker.kill()
    watch.write()


def _work(settings: Settings, number: int, model: nn.Module, steps: Any, ready: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    data = batches(settings.work, number, settings.workers, settings.batch_size, settings.seed)
    ready.wait()
    for inputs, labels in data:
        optimizer.zero_grad()
        loss_of(model, inputs, labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps[number] += 1


if __name__ == "__main__":
    main(from_command_line())
