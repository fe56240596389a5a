"""Train a job without dlctl's roles: `python -m daemons.plain DIRECTORY RANK RANKS STORE`.

DIRECTORY is a run directory with job.json. With several ranks they are torch's DDP over gloo, which
meet at the file STORE. Errors are a line of JSON on standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from daemons.plain.loop import Plain, evaluated, step_on, write
from daemons.process import print_error, read_job
from daemons.worker.building import Built, build
from dlctl.errors import DlctlError

VALUE_BYTES = 4


class RealEngine:
    """This process is one rank."""

    def __init__(self, built: Built, rank: int, ranks: int) -> None:
        self.built, self.rank, self.ranks = built, rank, ranks

    def now(self) -> float:
        return time.time()

    def step(self, epoch: int, first: int, stop: int, lr: float) -> float:
        number = first + self.rank
        return step_on(self.built, epoch, range(number, number + 1), lr)

    def evaluate(self) -> Mapping[str, float]:
        return evaluated(self.built)

    def agreed(self, reason: str) -> str:
        if self.ranks == 1:
            return reason
        said: list[Any] = [reason]
        torch.distributed.broadcast_object_list(said, 0)
        return str(said[0])


def main(directory: Path, rank: int, ranks: int, store: str) -> None:
    began_at = time.time()
    job = read_job(directory)
    built = build(job, rank, 0, directory)
    replica = built.stepper.replica
    if ranks > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
        )
        # The replicas begin alike (the job's seed), and each gradient is the mean of all.
        replica.train_through(torch.nn.parallel.DistributedDataParallel(replica.model))
    sent = 2 * (ranks - 1) * len(replica.parameters) * VALUE_BYTES
    course = Plain(job, built, rank, ranks).run(RealEngine(built, rank, ranks), sent)
    if rank == 0:
        write(directory, course, began_at, 0.0, {})
    built.loader.close()
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    except DlctlError as error:
        print_error(error)
        sys.exit(error.exit_code)
