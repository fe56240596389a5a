"""DiLoCo as a loop over torch.distributed, written from the paper (Douillard 2023, Algorithm 1)."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

Rows = list[np.ndarray[Any, Any]]


def replica(
    pipe: Connection, rank: int, ranks: int, store: str, batches: Rows, steps: int,
    x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], inner: dict[str, Any], outer: dict[str, Any],
) -> None:  # fmt: skip
    """One of the k workers; sends the parameters after the last round.

    batches: rows of least squares, in the order of this worker's steps; `steps` of them a round.
    """
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    theta = torch.zeros(x.shape[1])
    local = torch.nn.Parameter(theta.clone())
    inner_opt = torch.optim.AdamW([local], **inner)
    outer_param = torch.nn.Parameter(theta.clone())
    outer_opt = torch.optim.SGD([outer_param], **outer)
    for first in range(0, len(batches), steps):
        with torch.no_grad():
            local.copy_(outer_param)
        for rows in batches[first : first + steps]:
            a, b = torch.from_numpy(x[rows]), torch.from_numpy(y[rows])
            error = a @ local.detach().double() - b
            local.grad = (a.T @ error / len(rows)).float()
            inner_opt.step()
        delta = outer_param.detach() - local.detach()
        distributed.all_reduce(delta)
        outer_param.grad = delta / ranks
        outer_opt.step()
    pipe.send(outer_param.detach().numpy())
    distributed.destroy_process_group()
