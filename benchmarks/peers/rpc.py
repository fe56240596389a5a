"""A parameter server on torch.distributed.rpc (TensorPipe), asynchronous.

Rank 0 is the server. Each worker sends its gradient and receives the new parameters in one call.
"""

from __future__ import annotations

import os
import threading
import time

import torch
from torch import Tensor
from torch.distributed import rpc

from benchmarks.peers.settings import Settings, from_command_line
from benchmarks.peers.watch import Watch
from benchmarks.peers.work import Flat, batches

LOOK_S = 0.01
CALL_S_MAX = 600
SERVER = "server"


class Server:
    """State of rank 0; the others access it by `push_and_fetch`."""

    parameters: Tensor
    lr: float
    updates = 0
    lock = threading.Lock()
    ready: threading.Barrier


def push_and_fetch(gradient: Tensor) -> Tensor:
    """Runs on the server."""
    with Server.lock:
        Server.parameters.add_(gradient, alpha=-Server.lr)
        Server.updates += 1
    return Server.parameters


def wait_for_all() -> None:
    """Runs on the server, in a thread for each caller."""
    Server.ready.wait()


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    if settings.rank == 0:
        Server.parameters, Server.lr = Flat(settings.work).w, settings.lr
        Server.ready = threading.Barrier(settings.workers + 1)
    rpc.init_rpc(
        SERVER if settings.rank == 0 else f"worker-{settings.rank - 1}",
        rank=settings.rank,
        world_size=settings.workers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{settings.address}:{settings.port}", rpc_timeout=CALL_S_MAX
        ),
    )
    if settings.rank == 0:
        _serve(settings)
    else:
        _work(settings)


def _serve(settings: Settings) -> None:
    watch = Watch(settings, all_wait=False)
    Server.ready.wait()
    watch.start()
    while not watch.is_enough(lambda: Server.parameters, Server.updates):
        time.sleep(LOOK_S)
    watch.write()
    os._exit(0)  # Do not wait for the workers, which are blocked in their calls.


def _work(settings: Settings) -> None:
    flat = Flat(settings.work)
    worker = settings.rank - 1
    data = batches(settings.work, worker, settings.workers, settings.batch_size, settings.seed)
    rpc.rpc_sync(SERVER, wait_for_all)
    for inputs, labels in data:
        flat.compute_gradient(inputs, labels)
        flat.w.copy_(rpc.rpc_sync(SERVER, push_and_fetch, (flat.g,)))


if __name__ == "__main__":
    main(from_command_line())
