"""Which processes are one replica: what `dlctl.attach` is given as `group`, checked."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from daemons.attach.ranks import GroupRanks, ReplicaRanks
from dlctl.errors import DlctlError

HINT = (
    "call torch.distributed.init_process_group() first, then dlctl.attach(model, optimizer, "
    "group=True) in every process"
)


def check_alone(environment: Any = os.environ) -> None:
    """Raises DlctlError if this process is one of several, and no group was given."""
    processes = environment.get("WORLD_SIZE", "")
    if dist.is_available() and dist.is_initialized():
        processes = str(dist.get_world_size())
    if processes.isdecimal() and int(processes) > 1:
        raise DlctlError(
            f"this is one of {processes} processes, and dlctl.attach was given no group: each "
            "would be a worker of its own",
            hint=HINT,
        )


def begin(group: Any, processes: int | None, rank: int | None, within_s: float) -> GroupRanks:
    """group: of torch's, or True for all processes. processes, rank: that the job starts for a
    worker, and this one's; None: nobody has started them. Raises DlctlError.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise DlctlError("group= was given, and there is no process group", hint=HINT)
    found = dist.group.WORLD if group is True else group
    if not isinstance(found, dist.ProcessGroup):
        raise DlctlError(
            f"group={group!r:.80} is no group that this process is in",
            hint="give a ProcessGroup of torch.distributed, or True for all processes",
        )
    size = dist.get_world_size(found)
    if processes is not None and size != processes:
        raise DlctlError(
            f"the group has {size} processes, and a worker of this job has {processes}",
            hint=f"set processes = {size} in [workers], and let dlctl start them; or give "
            "group=True",
        )
    if rank is not None and rank != dist.get_rank(found):
        raise DlctlError(
            f"this process is rank {rank}, and has rank {dist.get_rank(found)} in the group",
            hint="give group=True, or a group in the order of the ranks",
        )
    return GroupRanks(found, within_s)


def check_same(ranks: ReplicaRanks, layout: Any) -> None:
    """Raises DlctlError in all ranks if their models differ. layout: `dlctl.model.flat.Layout`."""
    each = ranks.gathered(layout)
    if said := ranks.of_rank_0(lambda: _differ(each)):
        raise DlctlError(
            said, hint="every process of a replica has to make the same model, before it is cut"
        )


def _differ(each: list[Any]) -> str:
    first = each[0].entries
    for rank, layout in enumerate(each):
        if layout.entries == first:
            continue
        pairs = zip(first, layout.entries, strict=False)
        mine, its = next(((a, b) for a, b in pairs if a != b), (first[-1], layout.entries[-1]))
        return (
            f'the model of rank {rank} differs from that of rank 0: "{its.name}" is '
            f'{its.dtype}{list(its.shape)} there, "{mine.name}" is {mine.dtype}{list(mine.shape)} '
            "here"
        )
    return ""
