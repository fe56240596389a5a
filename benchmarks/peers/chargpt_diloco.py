"""DiLoCo over gloo on `examples/chargpt`: one process for each worker, an all-reduce each round.

    python -m benchmarks.peers.chargpt_diloco '{"rank": 0, "workers": 4, "address": ..., ...}'

`examples/chargpt/diloco.toml` in plain torch: AdamW inside, a cosine after a warm-up, gradients
clipped to a norm of 1, and a Nesterov step of 0.7 and 0.9 outside. Rank 0 writes
{"loss": nats, "seconds": of training} to `file`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

EXAMPLE = Path(__file__).parents[2] / "examples" / "chargpt"
LOCAL_STEPS, BATCH_SIZE, LR = 30, 4, 2e-3
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
WARM_UP, FINAL = 0.05, 0.1


def main(arguments: dict[str, Any]) -> None:
    """arguments: rank, workers, address, port, samples, seed, file."""
    sys.path.insert(0, str(EXAMPLE))
    from task import task

    torch.set_num_threads(1)
    rank, workers = arguments["rank"], arguments["workers"]
    dist.init_process_group(
        "gloo", f"tcp://{arguments['address']}:{arguments['port']}", rank=rank, world_size=workers
    )
    torch.manual_seed(arguments["seed"])
    model = task.model()
    (windows,) = task.dataset().tensors
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(arguments["seed"]))
    steps = arguments["samples"] // (workers * BATCH_SIZE)
    dist.barrier()
    began = time.monotonic()
    _train(task, model, windows[order[rank::workers]], steps, workers)
    took_s = time.monotonic() - began
    if rank == 0:
        with torch.no_grad():
            loss = float(task.evaluate(model)["val_loss"])
        Path(arguments["file"]).write_text(json.dumps({"loss": loss, "seconds": took_s}))
    dist.barrier()


def _train(task: Any, model: nn.Module, own: torch.Tensor, steps: int, workers: int) -> None:
    """own: uint8[windows of this rank, length]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _scale(step, steps))
    outer = parameters_to_vector(model.parameters()).detach().clone()
    momentum = torch.zeros_like(outer)
    for step in range(steps):
        first = step * BATCH_SIZE % (len(own) - BATCH_SIZE + 1)
        task.loss(model, (own[first : first + BATCH_SIZE],)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % LOCAL_STEPS == 0 or step + 1 == steps:
            displacement = outer - parameters_to_vector(model.parameters()).detach()
            dist.all_reduce(displacement)
            displacement /= workers
            momentum.mul_(OUTER_MOMENTUM).add_(displacement)
            outer.sub_(displacement.add_(momentum, alpha=OUTER_MOMENTUM), alpha=OUTER_LR)
            vector_to_parameters(outer.clone(), model.parameters())  # It stores views.


def _scale(step: int, steps: int) -> float:
    ramp = max(1, round(WARM_UP * steps))
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, steps - ramp)
    return FINAL + (1 - FINAL) * (1 + math.cos(math.pi * done)) / 2


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
