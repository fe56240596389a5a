"""torch's DistributedDataParallel over gloo, without or with one of its hooks.

Options: hook, "" or "fp16" or "powersgd"; rank, of PowerSGD.
"""

from __future__ import annotations

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import gloo
from benchmarks.peers.settings import Settings, from_command_line
from benchmarks.peers.work import batches, loss_of, model_of, vector_of

POWERSGD_STARTS = 10
ONE_BUCKET_MB = 400
"""One bucket: PowerSGD on gloo deadlocks when its buckets finish in different orders."""


def main(settings: Settings) -> None:
    gloo.join(settings)
    model = _wrapped(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    data = batches(
        settings.work, settings.rank, settings.workers, settings.batch_size, settings.seed
    )

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, *next(data)).backward()
        optimizer.step()

    gloo.train(settings, step, lambda: vector_of(model.module))


def _wrapped(settings: Settings) -> DistributedDataParallel:
    hook, model = settings.options.get("hook", ""), model_of(settings.work)
    if hook != "powersgd":
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped
    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=ONE_BUCKET_MB
    )
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=settings.options["rank"],
        start_powerSGD_iter=POWERSGD_STARTS,
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


if __name__ == "__main__":
    main(from_command_line())
