"""Gradients to a server and parameters back, as fast as possible: the time of a round trip.

    python -m benchmarks.peers.bounce METHOD '{"rank": 1, ...}'

Every process prints "ready"; for each line that it then reads, it makes `count` round trips and
prints their seconds as JSON. Rank 0 is the server, if the method has one, and prints nothing else.
A round trip ends when the worker's own model is up to date; only bare pyzmq has none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.figures import nothing
from benchmarks.peers.settings import RAY_ENVIRONMENT

RATE = 1e-3
CALL_S_MAX = 600


@dataclass(frozen=True, kw_only=True)
class Order:
    rank: int
    workers: int
    size: int
    """Elements of the gradient, float32."""
    count: int
    port: int = 0
    invitation: list[Any] = field(default_factory=list)
    """Of dlctl's server: the fields of `benchmarks.shard.Invitation`."""


def obey(work: Callable[[], list[float]]) -> None:
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(work()), flush=True)


def gradient_of(size: int) -> npt.NDArray[np.float32]:
    """float32[size], the gradient of every push of dlctl's workers."""
    return np.random.default_rng(1).standard_normal(size, dtype=np.float32)


def repeated(
    count: int, step: Callable[[], object], prepare: Callable[[], object] = nothing
) -> Callable[[], list[float]]:
    """The seconds of each step; `prepare` runs before each, off the clock."""

    def work() -> list[float]:
        times_s = []
        for _ in range(count):
            prepare()
            began = time.perf_counter()
            step()
            times_s.append(time.perf_counter() - began)
        return times_s

    return work


def dlctl(order: Order) -> None:
    from benchmarks.shard import Invitation, Worker
    from dlctl.compress.none import Dense, DenseOptions

    worker = Worker(Invitation(*order.invitation))
    first = gradient_of(order.size)
    gradient, model = np.zeros_like(first), np.zeros_like(first)
    compressor = Dense(DenseOptions())
    # The compressor moves what it sends out of the gradient and leaves zeros.
    fill = lambda: np.copyto(gradient, first)  # noqa: E731
    step = lambda: worker.push_and_update(compressor.take(gradient), model)  # noqa: E731
    obey(repeated(order.count, step, fill))


def pyzmq(order: Order) -> None:
    import zmq

    vector, context = np.ones(order.size, np.float32), zmq.Context()
    copy = vector.nbytes < zmq.COPY_THRESHOLD  # Below that, copying is cheaper.
    if order.rank == 0:
        router = context.socket(zmq.ROUTER)
        router.bind(f"tcp://127.0.0.1:{order.port}")
        print("ready", flush=True)
        while True:
            peer, *_ = router.recv_multipart(copy=copy)
            router.send_multipart([peer, vector], copy=copy)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{order.port}")

    def step() -> None:
        dealer.send(vector, copy=copy)
        dealer.recv(copy=copy)

    obey(repeated(order.count, step))


def torch_rpc(order: Order) -> None:
    import torch
    from torch.distributed import rpc

    from benchmarks.peers.rpc import Server, push_and_fetch

    torch.set_num_threads(1)
    Server.parameters, Server.lr = torch.zeros(order.size), RATE
    rpc.init_rpc(
        f"rank-{order.rank}", rank=order.rank, world_size=order.workers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{order.port}", rpc_timeout=CALL_S_MAX
        ),
    )  # fmt: skip
    if order.rank == 0:
        obey(list)  # It serves in its own threads.
    gradient, model = torch.ones(order.size), torch.zeros(order.size)

    def step() -> None:
        model.copy_(rpc.rpc_sync("rank-0", push_and_fetch, (gradient,)))

    obey(repeated(order.count, step))


def gloo(order: Order) -> None:
    """No server: an all-reduce of the gradients."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{order.port}", rank=order.rank,
        world_size=order.workers,
    )  # fmt: skip
    gradient, model = torch.zeros(order.size), torch.zeros(order.size)

    def step() -> None:
        dist.all_reduce(gradient)
        model.add_(gradient, alpha=-RATE)

    obey(repeated(order.count, step))


def ray(order: Order) -> None:
    os.environ.update(RAY_ENVIRONMENT)
    import ray
    import torch

    class Server:
        def __init__(self, size: int) -> None:
            self.parameters = torch.zeros(size)

        def push_and_fetch(self, gradient: np.ndarray) -> np.ndarray:
            self.parameters.add_(torch.tensor(gradient), alpha=-RATE)
            return self.parameters.numpy()

    class Worker:
        def __init__(self, size: int) -> None:
            self.gradient, self.model = np.ones(size, np.float32), np.zeros(size, np.float32)

        def bounce(self, server: Any, count: int) -> list[float]:
            def step() -> None:
                np.copyto(self.model, ray.get(server.push_and_fetch.remote(self.gradient)))

            return repeated(count, step)()

    ray.init(
        num_cpus=order.workers + 1, object_store_memory=2_000_000_000,
        include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    server = ray.remote(Server).remote(order.size)
    workers = [ray.remote(Worker).remote(order.size) for _ in range(order.workers)]

    def work() -> list[list[float]]:
        return ray.get([w.bounce.remote(server, order.count) for w in workers])

    work()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(work()), flush=True)
    ray.shutdown()


METHODS = {"dlctl": dlctl, "pyzmq": pyzmq, "rpc": torch_rpc, "gloo": gloo, "ray": ray}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in METHODS:
        sys.exit(__doc__)
    METHODS[sys.argv[1]](Order(**json.loads(sys.argv[2])))
