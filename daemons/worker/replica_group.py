"""The threads of a worker's group: sums over all replicas, by torch.distributed's gloo, or NCCL
(`sum_backends.py`).

The group re-forms within the same process whenever members join or leave: each generation gets a
new one, which is not torch's global default group. Its traffic is neither encrypted nor
authenticated.

A gloo collective cannot be interrupted, and a store whose process is paused never answers. So every
generation has its own thread, which is abandoned when the next generation begins; its last
operation ends when it times out or its connections close. For the same reason members do not wait
for a straggler inside a gloo operation but at the store, for the messages of all members, and look
up every second whether the generation is still theirs.

With gloo a gradient may be summed while it is computed (`early_sum.py`), in the compute thread.
These operations have no time limit: they last until the slowest member starts its own. The group
waits for them once all members have arrived; they end early when members that moved to another
generation close their connections.
"""

from __future__ import annotations

import json
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed

from daemons.loop import Loop
from daemons.process import in_words
from daemons.worker.early_sum import EarlySum
from daemons.worker.sum_backends import (
    Device,
    GivenUp,
    Gloo,
    Nccl,
    device_of,
    join_nccl,
    uses_nccl,
)
from daemons.worker.work_clock import WorkClock
from dlctl.errors import DlctlError
from dlctl.roles.protocol.effects import (
    GroupFailed,
    GroupJoined,
    GroupWaits,
    JoinGroup,
    LeaveGroup,
    OpenStore,
    Reduce,
    Reduced,
    StoreOpened,
    TaskFailed,
)
from dlctl.roles.worker.services.sums import (
    Claim,
    ModelLost,
    Row,
    SumPlan,
    SumRecords,
    plan_of,
    row_of,
)
from dlctl.wire import messages as m
from dlctl.wire.machine import Event
from dlctl.wire.messages import Array

dist: Any = torch.distributed  # Its types lack the stores.
WORD_S = 1.0
"""Interval between reports of the members that are still missing; within it an abandoned generation
ends its wait.
"""
STORE_S = 10.0
"""Timeout of one store operation until the members' timeout is known."""
STORES_KEPT = 2
"""Members that do not know of the new store may still read the old one."""


class GroupThread:
    """The loop's interface to the group; every effect is answered by an event."""

    def __init__(
        self, loop: Loop, host: str, device: Callable[[], torch.device], clock: WorkClock
    ) -> None:
        """host: the address of this machine at which the other members reach it. device: of the
        replica, once it is built.
        """
        self.host = host
        self.device = device
        self.clock = clock
        self.has_nccl = True
        """NCCL is available and has not failed."""
        self._loop = loop
        self._lock = threading.Lock()
        """Held while the records or the generation change."""
        self._records = SumRecords()
        self._member: _Member | None = None
        self._stores: list[Any] = []

    # ------------------------------------------------------------ from the loop's thread

    def open(self, effect: OpenStore) -> None:
        self._of(effect.generation).do(lambda member: member.open())

    def join(self, effect: JoinGroup) -> None:
        self._of(effect.generation).do(lambda member: member.join(effect))

    def reduce(self, effect: Reduce) -> None:
        member = self._member
        if member is None or member.generation != effect.generation or member.has_failed:
            self._loop.post(GroupFailed(effect.generation, "the group is not there any more"))
        else:
            member.do(lambda member: member.measured_reduce(effect))

    def leave(self, effect: LeaveGroup) -> None:
        with self._lock:
            if self._member is not None:
                self._member.end()
            self._member = None

    def _of(self, generation: int) -> _Member:
        """The thread of this generation; earlier threads are abandoned."""
        with self._lock:
            if self._member is None or self._member.generation != generation:
                if self._member is not None:
                    self._member.end()
                self._member = _Member(self, generation)
            return self._member

    # ------------------------------------------------------------ from the thread that computes

    def begin_sum(self, size: int, weight: float) -> EarlySum | None:
        """Sum the next gradient, float32[size], while it is computed; None: there is no group."""
        member = self._member
        return None if member is None else member.begin_sum(size, weight)

    # ------------------------------------------------------------ from the threads

    def is_current(self, member: _Member) -> bool:
        return self._member is member

    def post(self, member: _Member, event: Event) -> None:
        with self._lock:
            if self.is_current(member):
                self._loop.post(event)

    def fail(self, member: _Member, error: DlctlError) -> None:
        if self.is_current(member):
            self._loop.fail(error)

    def keep_store(self, store: Any) -> None:
        with self._lock:
            self._stores = [*self._stores[1 - STORES_KEPT :], store]

    def claim(self) -> Claim:
        with self._lock:
            return self._records.claim()

    def agree(self, member: _Member, claims: list[Claim]) -> None:
        """Raises DlctlError if the other members have continued without this replica."""
        with self._lock:
            self._check(member)
            agreed = self._records.agree(claims)
            # Posted under the lock, before a next generation can start: its claim assumes it.
            self._loop.post(GroupJoined(member.generation, *agreed))

    def keep(self, member: _Member, result: Reduced) -> None:
        with self._lock:
            self._check(member)
            self._records.keep(result)

    def deliver(self, member: _Member) -> None:
        with self._lock:
            self._check(member)
            self._loop.offer(self._records.deliver())

    def _check(self, member: _Member) -> None:
        if not self.is_current(member):
            raise GivenUp


class _Member:
    """This replica in one generation of the group, with a thread of its own."""

    def __init__(self, owner: GroupThread, generation: int) -> None:
        self.generation = generation
        self.has_failed = self._is_made = False
        self._owner = owner
        self._store: Any = None
        self._group: Gloo | Nccl | None = None
        self._rank = self._size = 0
        self._timeout_s = STORE_S
        self._sums = 0
        """Sums started in this generation."""
        self._early: EarlySum | None = None
        """The started part of the next sum."""
        self._memory: Any = None
        """float32[d], for early sums. Each generation has its own: operations of an older one may
        still write to theirs.
        """
        self._in_group = threading.Lock()
        """Held by the compute thread while it uses the group: dropping the last reference to the
        group blocks until all its operations are done.
        """
        self._is_over = threading.Event()
        self._work: queue.SimpleQueue[Callable[[_Member], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"group-{generation}", daemon=True).start()

    def do(self, work: Callable[[_Member], None]) -> None:
        self._work.put(work)

    def end(self) -> None:
        """The generation is superseded, or the worker has left the group."""
        self._is_over.set()
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work(self)
            except GivenUp:
                break
            except ModelLost as error:
                self._fail(error.message, m.MODEL_LOST)
                break
            except DlctlError as error:
                self._owner.fail(self, error)
                break
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                why = "" if self._is_made else m.UNMADE
                self._fail(f"{type(error).__name__}: {first}", why)
                break
        # Closing the connections notifies the other members at once.
        with self._in_group:
            group, early = self._group, self._early
            self._group = self._store = self._early = None
        if early is not None:
            early.free()
        if group is not None:
            group.end()
        del group

    def _fail(self, reason: str, why: str) -> None:
        self.has_failed = True
        self._owner.post(self, GroupFailed(self.generation, reason, why))

    # ------------------------------------------------------------ the effects

    def open(self) -> None:
        # If the store opened a socket itself, it would listen on all addresses of this machine.
        family = socket.AF_INET6 if ":" in self._owner.host else socket.AF_INET
        listener = socket.create_server((self._owner.host, 0), family=family)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            self._owner.host, port, None, True, timedelta(seconds=STORE_S),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip
        self._owner.keep_store(store)
        self._owner.post(self, StoreOpened(self.generation, f"{self._owner.host}:{port}"))

    def join(self, effect: JoinGroup) -> None:
        self._rank, self._size = effect.rank, effect.size
        self._timeout_s = effect.timeout_s
        timeout = timedelta(seconds=effect.timeout_s)
        host, _, port = effect.store.rpartition(":")
        try:  # Connect once first: the store's client floods the log if that is impossible.
            socket.create_connection((host, int(port)), effect.timeout_s).close()
        except OSError as error:
            text = f"no way from {self._owner.host} to {effect.store}: {error}"
            raise ConnectionError(text) from error
        store = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
        self._store = dist.PrefixStore(f"generation-{effect.generation}", store)
        own = device_of(self._owner.device()) if self._owner.has_nccl else Device()
        claims = self._exchange("claim", (self._owner.claim(), own), effect.timeout_s)
        if self._size > 1:
            self._group = self._joined([Device(*device) for _, device in claims])
        self._is_made = True
        self._owner.agree(self, [Claim(*claim) for claim, _ in claims])

    def _joined(self, devices: list[Device]) -> Gloo | Nccl:
        """Form the group. Raises what torch raises if that fails; the next one of this process is
        not tried with NCCL then.
        """
        within_s = self._timeout_s
        if not uses_nccl(devices):
            return Gloo(self._store, self._rank, self._size, self._owner.host, within_s)
        self._owner.has_nccl = False
        made = join_nccl(
            self._store, self._rank, self._size, self._owner.device(), within_s,
            self._is_over.is_set,
        )  # fmt: skip
        self._owner.has_nccl = True
        return made

    def begin_sum(self, size: int, weight: float) -> EarlySum | None:
        """Start the sum of a gradient's parts; called in the compute thread."""
        with self._in_group:
            if self._early is not None:  # That gradient was discarded.
                self._early.is_void = True
                return None
            if self._group is None or not self._is_made or not self._group.takes_parts:
                return None
            if self._memory is None or len(self._memory) != size:
                self._memory = torch.empty(size, dtype=torch.float32, device="cpu")
            self._early = EarlySum(self._start, self._memory, weight)
            return self._early

    def _start(self, part: Any) -> Any:
        """Start the sum of a part. Raises ConnectionError, and whatever gloo raises."""
        with self._in_group:
            if self._group is None:
                raise ConnectionError("the group is not there any more")
            return self._group.start(part)

    def measured_reduce(self, effect: Reduce) -> None:
        with self._owner.clock.summing():
            self.reduce(effect)

    def reduce(self, effect: Reduce) -> None:
        self._sums += 1
        early, self._early = self._early, None
        row = row_of(effect)
        if early is not None:
            is_void = not early.is_of(effect.vector, effect.weight)
            row = row._replace(begun=len(early.summed), is_void=is_void)
        rows = [Row(*row) for row in self._exchange(f"row-{self._sums}", row)]
        try:
            plan = plan_of(rows)
        except ModelLost:
            raise
        except DlctlError as error:  # All replicas fail alike: the run cannot continue.
            self._owner.post(self, TaskFailed(in_words(error), ""))
            raise GivenUp from error
        vector = self._summed_early(early, effect.vector, plan) if plan.begun else None
        if vector is None:
            vector = self._summed(effect.vector, plan)
        vector.flags.writeable = False
        is_counted = not effect.joins and effect.step == plan.step
        result = Reduced(
            self.generation, 0, vector, sum(plan.weights), self._size, plan.step, plan.joined,
            is_counted, plan.current, plan.beside,
        )  # fmt: skip
        self._owner.keep(self, result)
        is_last = self._await_kept()
        self._owner.deliver(self)
        # All members have read them. A run may make millions of sums.
        self._store.delete_key(f"row-{self._sums}-{self._rank}")
        if is_last:
            self._store.delete_key(f"kept-{self._sums}")
            self._store.delete_key(f"all-{self._sums - 1}")

    def _summed(self, own: Array, plan: SumPlan) -> Array:
        """float32[plan.size], the sum over all members, bitwise identical on each of them."""
        total = 1.0 if plan.dtype == "float32" else sum(plan.weights)
        weight = plan.weights[self._rank]
        # Zero times NaN or infinity is not zero.
        vector = np.zeros(plan.size, np.float32) if not weight else np.float32(weight / total) * own
        if any(plan.weights):
            tensor = torch.from_numpy(vector).to(getattr(torch, plan.dtype))
            if self._group is not None:
                self._group.sum(tensor, self._timeout_s, self._is_over.is_set)
            vector = tensor.float().numpy()
        return vector if total == 1.0 else vector * np.float32(total)

    def _summed_early(self, early: EarlySum | None, own: Array, plan: SumPlan) -> Array | None:
        """The sum that some members have started early; None: a member has discarded its part."""
        if early is None:
            weight = 0.0 if plan.is_void else plan.weights[self._rank]
            memory = torch.empty(plan.begun, dtype=torch.float32, device="cpu")
            early = EarlySum(self._start, memory, weight)
            early.begin_rest(torch.from_numpy(own))
        early.wait(lambda work: work.wait(timedelta(seconds=self._timeout_s)))
        return None if plan.is_void else early.summed.numpy()

    # ------------------------------------------------------------ at the store

    def _exchange(
        self, what: str, own: Sequence[Any], within_s: float = math.inf
    ) -> list[list[Any]]:
        """The messages of all members, by rank, once all have sent theirs. own: JSON values.

        Raises TimeoutError if a member does not arrive within the limit. A sum has none, because a
        member may compute for long.
        """
        keys = [f"{what}-{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(own))
        until = time.monotonic() + within_s
        while True:
            left_s = max(0.01, until - time.monotonic())
            self._store.set_timeout(timedelta(seconds=min(WORD_S, left_s)))
            try:
                found = self._store.multi_get(keys)  # Waits for all of them.
                break
            except dist.DistStoreError:
                self._report_missing(keys, until)
        if self._is_over.is_set():
            raise GivenUp
        self._store.set_timeout(timedelta(seconds=self._timeout_s))
        return [json.loads(text) for text in found]

    def _await_kept(self) -> bool:
        """Wait until every member has recorded the result of this sum: at the store, because gloo's
        barrier takes more CPU time. Returns whether this member was the last one.
        """
        have_all = f"all-{self._sums}"
        if self._store.add(f"kept-{self._sums}", 1) == self._size:
            self._store.set(have_all, "")
            return True
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                self._store.wait([have_all], timedelta(seconds=WORD_S))
                return False
            except dist.DistStoreError:
                if self._is_over.is_set():
                    raise GivenUp from None
                if time.monotonic() > until:
                    raise TimeoutError("a member did not record a sum in time") from None

    def _report_missing(self, keys: list[str], until: float) -> None:
        """Report whose keys are missing. Raises TimeoutError if it is past `until`, and GivenUp if
        the generation is over.
        """
        if self._is_over.is_set():
            raise GivenUp
        missing = tuple(rank for rank, key in enumerate(keys) if not self._store.check([key]))
        if not missing:  # They have come just now.
            return
        if time.monotonic() >= until:
            raise TimeoutError(f"rank {', '.join(map(str, missing))} did not arrive in time")
        self._owner.post(self, GroupWaits(self.generation, missing))
