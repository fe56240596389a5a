"""The thread of a worker's group: sums over all replicas, by torch.distributed's gloo.

A group is made anew for each generation, in the same process and as often as members come and go,
so it is no global one of torch's. Its traffic is neither encrypted nor authenticated.

What this thread has finished counts: if a member dies in a sum, some of the others may have its
result and some may not. Then a new group begins by giving the result to those without.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daemons.loop import Loop
from dlctl.errors import DlctlError
from dlctl.machine import Event
from dlctl.roles.protocol.effects import (
    GroupFailed,
    GroupJoined,
    JoinGroup,
    OpenStore,
    Reduce,
    Reduced,
    StoreOpened,
)

if TYPE_CHECKING:
    from torch import Tensor

JOINS = -1.0
"""In place of the number of finished sums, of a member that has taken part in none."""


class GroupThread:
    def __init__(self, loop: Loop, host: str) -> None:
        """host: this machine's address, by which the other members reach it."""
        self._loop = loop
        self._host = host
        self._stores: list[Any] = []
        """Rendezvous that were opened here; an old one may still be looked at."""
        self._group: Any = None
        self._generation = 0
        self._rank = self._size = 0
        self._timeout = timedelta(seconds=10)
        self._finished = JOINS
        self._last: Reduced | None = None
        """The newest sum that was finished here."""
        self._work: queue.SimpleQueue[Callable[[], Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="group", daemon=True).start()

    def open(self, effect: OpenStore) -> None:
        self._work.put(partial(self._open, effect))

    def join(self, effect: JoinGroup) -> None:
        self._work.put(partial(self._join, effect))

    def reduce(self, effect: Reduce) -> None:
        self._work.put(partial(self._reduce, effect))

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                self._loop.post(work())
            except DlctlError as error:
                self._loop.fail(error)
            except Exception as error:
                self._leave()
                first = (str(error).splitlines() or [""])[0]
                self._loop.post(GroupFailed(self._generation, f"{type(error).__name__}: {first}"))

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _open(self, effect: OpenStore) -> StoreOpened:
        dist = _torch()
        self._generation = effect.generation
        store = dist.TCPStore(self._host, 0, None, True, self._timeout, wait_for_workers=False)
        self._stores = [*self._stores[-1:], store]
        return StoreOpened(effect.generation, f"{self._host}:{store.port}")

    def _join(self, effect: JoinGroup) -> GroupJoined:
        dist = _torch()
        self._leave()
        self._generation, self._rank, self._size = effect.generation, effect.rank, effect.size
        self._timeout = timedelta(seconds=effect.timeout_s)
        host, _, port = effect.store.rpartition(":")
        store = dist.TCPStore(host, int(port), None, False, self._timeout)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        prefixed = dist.PrefixStore(f"generation-{effect.generation}", store)
        self._group = dist.ProcessGroupGloo(prefixed, self._rank, self._size, options)
        finished = [row[0] for row in self._gather([self._finished])]
        newest = max(0.0, *finished)
        own, self._finished = self._finished, newest
        if newest > 0 and newest - 1 in finished:
            self._hand_on(finished.index(newest))
        missed = self._last if own == newest - 1 > JOINS else None
        rejoins, is_first = JOINS < own < newest - 1, set(finished) == {JOINS}
        return GroupJoined(effect.generation, int(newest), missed, is_first, rejoins)

    def _hand_on(self, rank: int) -> None:
        """Everybody gets the newest sum, from a member that has it."""
        import torch

        last = self._last
        head, vector = torch.zeros(5, dtype=torch.float64), torch.zeros(0)
        if self._rank == rank:
            assert last is not None
            vector = torch.from_numpy(np.array(last.vector))
            known = [len(vector), last.weight, last.members, last.step, last.joined]
            head[:] = torch.tensor(known, dtype=torch.float64)
        self._broadcast(head, rank)
        size, weight, members, step, joined = head.tolist()
        if self._rank != rank:
            vector = torch.empty(int(size))
        self._broadcast(vector, rank)
        self._last = Reduced(
            self._generation, 0, vector.numpy(), weight, int(members), int(step), int(joined)
        )

    def _reduce(self, effect: Reduce) -> Event:
        import torch

        if self._group is None or effect.generation != self._generation:
            return GroupFailed(effect.generation, "the group is not there any more")
        rows = self._gather([effect.weight, float(effect.step), float(effect.joins)])
        step = max(row[1] for row in rows)
        counts = [row[0] if row[1] == step else 0.0 for row in rows]
        vector = torch.from_numpy(effect.vector * np.float32(counts[self._rank]))
        self._group.allreduce([vector]).wait(self._timeout)
        self._finished += 1
        joined = int(sum(row[2] for row in rows))
        self._last = Reduced(
            effect.generation, int(self._finished), vector.numpy(), sum(counts), self._size,
            int(step), joined,
        )  # fmt: skip
        return self._last

    def _gather(self, row: list[float]) -> list[list[float]]:
        """The rows of all members, by rank."""
        import torch

        own = torch.tensor(row, dtype=torch.float64)
        rows = [torch.zeros_like(own) for _ in range(self._size)]
        self._group.allgather([rows], [own]).wait(self._timeout)
        return [each.tolist() for each in rows]

    def _broadcast(self, tensor: Tensor, rank: int) -> None:
        options = _torch().BroadcastOptions()
        options.rootRank, options.rootTensor = rank, 0
        self._group.broadcast([tensor], options).wait(self._timeout)


def _torch() -> Any:
    """torch.distributed; only where a method has a group is it loaded."""
    import torch.distributed as dist

    return dist
