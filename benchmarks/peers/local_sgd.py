"""Methods that make many local steps between two all-reduces, over gloo.

Options: method, "diloco" (Douillard 2023: an outer Nesterov step on the mean of the replicas'
deltas) or "postlocal" (Lin 2020, torch's own: the mean of the replicas); local_steps; outer_lr and
outer_momentum, of diloco.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import gloo
from benchmarks.peers.settings import Settings, from_command_line
from benchmarks.peers.work import Flat, batches, loss_of, model_of, vector_of


def main(settings: Settings) -> None:
    gloo.join(settings)
    {"diloco": _diloco, "postlocal": _post_local}[settings.options["method"]](settings)


def _diloco(settings: Settings) -> None:
    options, flat, data = settings.options, Flat(settings.work), _batches(settings)
    outer, moved = flat.w.clone(), torch.zeros_like(flat.w)
    steps = 0

    def step() -> None:
        nonlocal steps
        flat.compute_gradient(*data())
        flat.w.add_(flat.g, alpha=-settings.lr)
        steps += 1
        if steps % options["local_steps"] == 0:
            mean = outer - flat.w
            dist.all_reduce(mean)
            mean /= settings.workers
            moved.mul_(options["outer_momentum"]).add_(mean)
            outer.sub_(mean.add_(moved, alpha=options["outer_momentum"]), alpha=options["outer_lr"])
            flat.w.copy_(outer)

    gloo.train(settings, step, lambda: flat.w)


def _post_local(settings: Settings) -> None:
    """With torch's own parts. The first round is plain DDP, as its documentation has it."""
    model = DistributedDataParallel(model_of(settings.work), gradient_as_bucket_view=True)
    alone, _ = dist.new_subgroups(group_size=1)
    local_steps, data = settings.options["local_steps"], _batches(settings)
    state = post_localSGD_hook.PostLocalSGDState(
        None, alone, start_localSGD_iter=local_steps, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=settings.lr),
        PeriodicModelAverager(period=local_steps, warmup_steps=local_steps),
    )

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, *data()).backward()
        optimizer.step()

    gloo.train(settings, step, lambda: vector_of(model.module))


def _batches(settings: Settings) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    of_worker = batches(
        settings.work, settings.rank, settings.workers, settings.batch_size, settings.seed
    )
    return lambda: next(of_worker)


if __name__ == "__main__":
    main(from_command_line())
