"""The steps that each method needs at several rates: python -m benchmarks.peers.rates

All replicas in turn in one process, so that the figures do not depend on the machine: steps of all
workers together until a test accuracy of 85 %, for three orders of the samples. `train` also
measures the cost of a step. The rates in `table.py` are among the best here, for every method. For
asynchronous replicas (Hogwild, a server without a barrier) the order here is the worst case: all of
them compute on the parameters of the previous step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.peers.work import Flat, accuracy, batches

WORK, TARGET = "fashion", 0.85
WORKERS, BATCH_SIZE = 4, 32
SEEDS = 3
FIRST_LOOK, LOOK_EVERY, STEPS_MAX = 256, 64, 6000


class Replicas:
    """Gradients of all workers, each on its own samples."""

    def __init__(self, seed: int) -> None:
        self._flat = Flat(WORK)
        self._data = [batches(WORK, i, WORKERS, BATCH_SIZE, seed) for i in range(WORKERS)]
        self.w = self._flat.w.clone()
        """float32[d]: the initial parameters of all."""

    def gradient(self, worker: int, w: Tensor) -> Tensor:
        """Of its next batch at `w`; valid until the next call."""
        self._flat.w.copy_(w)
        self._flat.compute_gradient(*next(self._data[worker]))
        return self._flat.g


Method = Callable[[Replicas], Iterator[Tensor]]
"""Yields the shared parameters after every step of one worker."""


def without_waiting(lr: float, replicas: Replicas) -> Iterator[Tensor]:
    """An asynchronous server, or Hogwild: every gradient is one step of all workers stale."""
    w = replicas.w
    seen = [w.clone() for _ in range(WORKERS)]
    while True:
        for worker, old in enumerate(seen):
            w -= lr * replicas.gradient(worker, old)
            old.copy_(w)
            yield w


def mean_gradient(lr: float, momentum: float, replicas: Replicas) -> Iterator[Tensor]:
    """DDP."""
    w = replicas.w
    velocity = torch.zeros_like(w)
    while True:
        velocity *= momentum
        before = w.clone()
        for worker in range(WORKERS):
            velocity += replicas.gradient(worker, before) / WORKERS
            if worker < WORKERS - 1:
                yield w
        w -= lr * velocity
        yield w


def rounds(
    steps: int, lr: float, outer_lr: float, momentum: float, replicas: Replicas
) -> Iterator[Tensor]:
    """Local SGD: the mean of the replicas' deltas, and a Nesterov step along it (DiLoCo)."""
    w = replicas.w
    velocity = torch.zeros_like(w)
    while True:
        delta = torch.zeros_like(w)
        for worker in range(WORKERS):
            alone = w.clone()
            for _ in range(steps):
                alone -= lr * replicas.gradient(worker, alone)
                yield w
            delta += (w - alone) / WORKERS
        velocity = momentum * velocity + delta
        w -= outer_lr * (delta + momentum * velocity)


def downpour(steps: int, lr: float, local_lr: float, replicas: Replicas) -> Iterator[Tensor]:
    """A push and a fetch every `steps`, one worker after the other."""
    w = replicas.w
    alone = [w.clone() for _ in range(WORKERS)]
    accrued = [torch.zeros_like(w) for _ in range(WORKERS)]
    made = [steps * worker // WORKERS for worker in range(WORKERS)]
    while True:
        for worker in range(WORKERS):
            gradient = replicas.gradient(worker, alone[worker])
            accrued[worker] += gradient
            alone[worker] -= local_lr * gradient
            made[worker] += 1
            if made[worker] % steps == 0:
                w -= lr * accrued[worker]
                accrued[worker].zero_()
                alone[worker].copy_(w)
            yield w


def steps_until_good(method: Method, seed: int) -> int:
    """Of all workers together; at most `STEPS_MAX`."""
    for made, w in enumerate(method(Replicas(seed)), 1):
        is_time = made >= FIRST_LOOK and made % LOOK_EVERY == 0
        if made >= STEPS_MAX or (is_time and accuracy(WORK, w) >= TARGET):
            return made
    raise AssertionError("a method does not end")


METHODS: dict[str, Method] = {
    **{f"server or Hogwild, {lr}": partial(without_waiting, lr) for lr in (0.03, 0.05, 0.1, 0.2)},
    **{f"DDP, {lr}": partial(mean_gradient, lr, 0.0) for lr in (0.1, 0.2, 0.4)},
    "DDP, 0.1, momentum 0.9": partial(mean_gradient, 0.1, 0.9),
    **{
        f"DiLoCo H={steps}, {lr}": partial(rounds, steps, lr, 0.7, 0.9)
        for steps in (4, 8, 16, 32, 64)
        for lr in (0.05, 0.1, 0.2)
    },
    **{f"post-local H=16, {lr}": partial(rounds, 16, lr, 1.0, 0.0) for lr in (0.1, 0.2)},
    **{
        f"Downpour n=16, {lr}, local {local_lr}": partial(downpour, 16, lr, local_lr)
        for lr in (0.02, 0.04)
        for local_lr in (0.1, 0.2)
    },
}


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'steps':>6}  {'min .. max':<14}  method, rate of a step")
    for name, method in METHODS.items():
        steps = sorted(steps_until_good(method, seed) for seed in range(SEEDS))
        print(f"{median(steps):6.0f}  {f'{steps[0]} .. {steps[-1]}':<14}  {name}", flush=True)


if __name__ == "__main__":
    main()
