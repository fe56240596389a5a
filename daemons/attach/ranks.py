"""The processes of one replica (`dlctl.attach(group=)`), as the user's threads see each other.

All of them run the same script, and call dlctl in the same order. Rank 0 talks to the run, and
tells the others what comes of it. This goes over a group of gloo's beside the user's own: it is
about objects and values in host memory, and must not get between the script's own collectives.

A process that exits closes its connections, so the others get an error at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dlctl.errors import DlctlError

T = TypeVar("T")
TIMEOUT_S = 1800.0
"""As torch's own: one rank may be so much later than another, as it compiles or saves."""
CPU = torch.device("cpu")


class ReplicaRanks(Protocol):
    rank: int
    count: int

    def of_rank_0(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, in all ranks. Only there `make` is called."""
        ...

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, in rank 0; [] in others."""
        ...


class OneRank:
    rank, count = 0, 1

    def of_rank_0(self, make: Callable[[], T]) -> T:
        return make()

    def gathered(self, value: T) -> list[T]:
        return [value]


class GroupRanks:
    """group: of torch's, of which this process is a member. Create this in all of them."""

    def __init__(self, group: dist.ProcessGroup, within_s: float) -> None:
        """within_s: for all ranks to come to this. Raises DlctlError that names those that have
        not.
        """
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        members = dist.get_process_group_ranks(group)
        _await_all(self.rank, members, within_s)
        self._group: Any = dist.new_group(
            ranks=members, backend="gloo", timeout=timedelta(seconds=TIMEOUT_S),
            use_local_synchronization=True,
        )  # fmt: skip

    def of_rank_0(self, make: Callable[[], T]) -> T:
        box: list[Any] = [make() if self.rank == 0 else None]
        with explained("taking what rank 0 has made"):
            dist.broadcast_object_list(box, group_src=0, group=self._group, device=CPU)
        made: T = box[0]
        return made

    def gathered(self, value: T) -> list[T]:
        values: list[Any] | None = [None] * self.count if self.rank == 0 else None
        with explained("telling rank 0"):
            dist.gather_object(value, values, group_dst=0, group=self._group)
        return values or []

    def broadcast(self, values: Tensor) -> None:
        """Give all ranks the values of rank 0, in host memory."""
        with explained("taking the values of rank 0"):
            dist.broadcast(values, group_src=0, group=self._group)


def _await_all(rank: int, members: list[int], within_s: float) -> None:
    """Raises DlctlError that names the ranks that have not come."""
    c10d: Any = dist.distributed_c10d  # Its types lack the stores.
    store = c10d.PrefixStore("dlctl-attach", c10d._get_default_store())
    name = "-".join(map(str, members))
    store.set(f"{name}/{rank}", "")
    try:
        keys = [f"{name}/{each}" for each in range(len(members))]
        store.wait(keys, timedelta(seconds=within_s))
    except RuntimeError as error:
        missing = [str(n) for n, key in enumerate(keys) if not store.check([key])]
        raise DlctlError(
            f"rank {' and '.join(missing) or '?'} of {len(members)} has not called dlctl.attach "
            f"within {within_s:g} s",
            hint="call it in every process of the group, with the same model",
        ) from error


@contextmanager
def explained(doing: str) -> Any:
    """Around what needs the other ranks. Raises DlctlError if one of them is gone."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).splitlines() or [""])[0]
        raise DlctlError(
            f"another process of this replica is gone, or does something else, while {doing}",
            hint=f"its own lines in the log say why; torch says: {first:.200}",
        ) from error
