"""Sparse logistic regression in shared memory by two real processes, with a lock around each step
or without any: what Hogwild! (Niu et al. 2011) is about. Its times are real ones of this machine.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import Tensor, multiprocessing, nn
from torch.nn import functional

Json = dict[str, Any]
WORDS, DOCUMENTS, LENGTH, BATCH = 50_000, 16_000, 60, 32
LR = 20.0
WAIT_S = 300.0


class Bags:
    """Documents with a few words of many: two batches rarely have the same ones."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.words = (WORDS * torch.rand(DOCUMENTS, LENGTH, generator=rng) ** 2).long()
        weights = torch.randn(WORDS, generator=rng)
        self.labels = (weights[self.words].sum(1) > 0).float()

    def loss(self, model: nn.Module, rows: Tensor | slice) -> Tensor:
        scores = model(self.words[rows])[:, 0]
        return functional.binary_cross_entropy_with_logits(scores, self.labels[rows])


def answer(request: Json) -> Json:
    """request: {"seeds", "epochs"}. Returns arm -> {"seconds": [...], "loss": [...]}, by seed."""
    arms = {"1 process": (1, False), "2, no locks": (2, False), "2, with locks": (2, True)}
    found: Json = {name: {"seconds": [], "loss": []} for name in arms}
    for seed in request["seeds"]:
        bags = Bags(seed)
        for name, (count, has_lock) in arms.items():
            seconds, loss = _train(bags, count, request["epochs"], has_lock=has_lock)
            found[name]["seconds"].append(seconds)
            found[name]["loss"].append(loss)
    return found


def _train(bags: Bags, count: int, epochs: int, *, has_lock: bool) -> tuple[float, float]:
    context = multiprocessing.get_context("fork")
    model = nn.EmbeddingBag(WORDS, 1, mode="mean", sparse=True)
    nn.init.zeros_(model.weight)
    model.share_memory()
    lock = context.Lock() if has_lock else contextlib.nullcontext()
    barrier = context.Barrier(count + 1)
    processes = [
        context.Process(target=_work, args=(bags, model, number, count, epochs, lock, barrier))
        for number in range(count)
    ]
    for process in processes:
        process.start()
    try:
        barrier.wait(WAIT_S)
        began = time.perf_counter()
        barrier.wait(WAIT_S)
        seconds = time.perf_counter() - began
    finally:
        for process in processes:
            process.join(1.0)
            process.kill()
            process.join()
    with torch.no_grad():
        return seconds, float(bags.loss(model, slice(None)))


def _work(
    bags: Bags, model: nn.Module, number: int, count: int, epochs: int, lock: Any, barrier: Any
) -> None:
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    barrier.wait(WAIT_S)
    for epoch in range(epochs):
        rng = torch.Generator().manual_seed(epoch)
        order = torch.randperm(DOCUMENTS, generator=rng).split(BATCH)  # type: ignore[no-untyped-call]
        for rows in order[number::count]:
            with lock:
                optimizer.zero_grad()
                bags.loss(model, rows).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    barrier.wait(WAIT_S)
