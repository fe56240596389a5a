"""DistributedDataParallel on `examples/chargpt`, for torchrun: AdamW and clipping.

    torchrun --standalone --nproc-per-node 4 benchmarks/peers/chargpt_ddp.py DIRECTORY BATCH_SIZE

Every process appends the start time of each step (monotonic seconds) to its own file there. There
is no checkpoint: after a restart all processes start over.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

EXAMPLE = Path(__file__).parents[2] / "examples" / "chargpt"
LR = 2e-3


def main(directory: Path, batch_size: int) -> None:
    """Runs until it is killed."""
    sys.path.insert(0, str(EXAMPLE))
    from task import loss_of, task

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    (windows,) = task.dataset().tensors
    own = windows[rank::workers]
    with (directory / f"times-{os.getpid()}").open("a", buffering=1) as times:
        for step in range(sys.maxsize):
            times.write(f"{time.monotonic()}\n")
            first = step * batch_size % (len(own) - batch_size + 1)
            loss_of(model, own[first : first + batch_size]).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
