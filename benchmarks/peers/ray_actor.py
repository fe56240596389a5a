"""A parameter server that is a Ray actor, asynchronous, as in Ray's documentation.

The driver passes each finished gradient to the server, and the new parameters to that worker. A
separate thread takes and evaluates the copies for the watch, so that no worker waits for them.
"""

from __future__ import annotations

import os
import time
from threading import Thread
from typing import Any

import numpy as np
import torch

from benchmarks.peers.settings import RAY_ENVIRONMENT, Settings, from_command_line
from benchmarks.peers.watch import Watch
from benchmarks.peers.work import Flat, batches

os.environ.update(RAY_ENVIRONMENT)
import ray

STORE_BYTES = 1_000_000_000
LOOK_S = 0.02


class Server:
    """float32[d] in, float32[d] out."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        self._parameters, self._lr = Flat(settings.work).w, settings.lr

    def apply(self, gradient: np.ndarray) -> np.ndarray:
        self._parameters.add_(torch.tensor(gradient), alpha=-self._lr)
        return self._parameters.numpy()

    def parameters(self) -> np.ndarray:
        return self._parameters.numpy()


class Worker:
    def __init__(self, settings: Settings, number: int) -> None:
        torch.set_num_threads(1)
        self._flat = Flat(settings.work)
        self._batches = batches(
            settings.work, number, settings.workers, settings.batch_size, settings.seed
        )

    def is_ready(self) -> bool:
        return True

    def gradient(self, parameters: np.ndarray) -> np.ndarray:
        self._flat.w.copy_(torch.tensor(parameters))
        self._flat.compute_gradient(*next(self._batches))
        return self._flat.g.numpy()


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    ray.init(
        num_cpus=settings.workers + 1, object_store_memory=STORE_BYTES,
        include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        _train(settings)
    finally:
        ray.shutdown()


def _train(settings: Settings) -> None:
    server = ray.remote(Server).remote(settings)
    workers = [ray.remote(Worker).remote(settings, i) for i in range(settings.workers)]
    watch = Watch(settings, all_wait=False)
    newest = server.parameters.remote()
    ray.get([newest, *(worker.is_ready.remote() for worker in workers)])
    updates = 0

    def look() -> None:
        while not watch.is_enough(lambda: torch.tensor(ray.get(newest)), updates):
            time.sleep(LOOK_S)

    looking = Thread(target=look)
    watch.start()
    at_work: dict[Any, Any] = {worker.gradient.remote(newest): worker for worker in workers}
    looking.start()
    while looking.is_alive():
        (done,), _ = ray.wait(list(at_work))
        worker = at_work.pop(done)
        newest = server.apply.remote(done)
        at_work[worker.gradient.remote(newest)] = worker
        updates += 1
    watch.write()


if __name__ == "__main__":
    main(from_command_line())
