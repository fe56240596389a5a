"""A member of a real group in a process of its own, which does what the test tells it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np

from daemons.worker import replica_group
from daemons.worker.replica_group import GroupThread
from daemons.worker.work_clock import WorkClock
from dlctl.roles.protocol.effects import (
    GroupJoined,
    GroupWaits,
    JoinGroup,
    LeaveGroup,
    OpenStore,
    Reduce,
    Reduced,
    StoreOpened,
)
from dlctl.wire.machine import Effect, Event
from dlctl.wire.messages import Array

HOST = "127.0.0.1"
COMES_S = 60.0
SIZE, LONG = 1000, 1_000_000
# torch asks for the name of each address that it connects to. Where nobody answers, that takes 5 s.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
_FORKS = multiprocessing.get_context("forkserver")
"""Members come from one process that has torch: its import takes longer than what they are for."""
_FORKS.set_forkserver_preload(["torch.distributed", "daemons.worker.replica_group"])


class HangInSum(Effect):
    """Stand still (SIGSTOP) when all have come to the next sum, before it is made."""


class BeginSum(Effect):
    """Of `vector_of` a slot: so many parts. The next `Reduce` is of the same, with the rest."""

    def __init__(self, slot: int, parts: int) -> None:
        self.slot, self.parts = slot, parts


class SeemToHaveGpu(Effect):
    """Tell the others of a GPU, on which NCCL then fails."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


def _seem_to_have_gpu(effect: SeemToHaveGpu) -> None:
    replica_group.device_of = lambda _: replica_group.Device(effect.uuid, "2.27.3")

    def fail(*_: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    replica_group.join_nccl = fail  # type: ignore[assignment]


def _hang_in_sum(_: HangInSum) -> None:
    replica_group._Member._summed = lambda *_: os.kill(os.getpid(), STOP)  # type: ignore[assignment,method-assign]


class _Pipe:
    """What a group's threads need of a loop."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._lock = threading.Lock()

    def post(self, event: Event) -> None:
        with self._lock:
            self.pipe.send(event)

    offer = post

    def fail(self, error: Exception) -> None:
        os._exit(3)


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    threads = GroupThread(_Pipe(pipe), HOST, lambda: torch.device("cpu"), WorkClock())  # type: ignore[arg-type]
    do = {
        OpenStore: threads.open,
        JoinGroup: threads.join,
        Reduce: threads.reduce,
        LeaveGroup: threads.leave,
        HangInSum: _hang_in_sum,
        SeemToHaveGpu: _seem_to_have_gpu,
    }
    pipe.send("ready")
    early, vector = None, None
    while True:
        effect = pipe.recv()
        if isinstance(effect, BeginSum):
            vector = vector_of(effect.slot, LONG)
            early = threads.begin_sum(LONG, 1.0)
            for _ in range(effect.parts):
                early.begin(torch.from_numpy(vector))
            continue
        if isinstance(effect, Reduce) and vector is not None:
            if early is not None:
                early.begin_rest(torch.from_numpy(vector))
            effect, early = replace(effect, vector=vector), None
        do[type(effect)](effect)


class Member:
    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.pipe, theirs = _FORKS.Pipe()
        self.process = _FORKS.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._is_ready = False

    def wait(self) -> None:
        """Until it has imported torch: that may take longer than a join may."""
        if not self._is_ready:
            assert self.pipe.recv() == "ready"
        self._is_ready = True

    def do(self, effect: Effect) -> None:
        self.pipe.send(effect)

    def hears(self, *kinds: type[Event], generation: int = 0) -> Any:
        """The next event of these kinds, and of no older generation."""
        deadline = time.monotonic() + COMES_S
        while self.pipe.poll(max(0.0, deadline - time.monotonic())):
            event = self.pipe.recv()
            if isinstance(event, kinds) and event.generation >= generation:
                return event
            is_old = event.generation < generation
            assert is_old or isinstance(event, GroupWaits), event
        raise AssertionError(f"worker-{self.slot} has not heard of {kinds}")

    def reduce(self, generation: int, vector: Array, step: int = 0, weight: float = 1.0) -> None:
        self.do(Reduce(generation, vector, weight, step, False, False, self.slot))

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class Members:
    """Processes, and the coordinator's part in making their groups."""

    def __init__(self, count: int) -> None:
        self.all = [Member(slot) for slot in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.all:
            member.process.kill()
        for member in self.all:
            member.process.join()

    def join(self, generation: int, members: list[Member], timeout_s: float = 5.0) -> list[Any]:
        for member in members:
            member.wait()
        members[0].do(OpenStore(generation))
        store = members[0].hears(StoreOpened, generation=generation).address
        for rank, member in enumerate(members):
            member.do(JoinGroup(generation, rank, len(members), store, timeout_s))
        return [member.hears(GroupJoined, generation=generation) for member in members]

    def sum(self, generation: int, members: list[Member]) -> list[Reduced]:
        for member in members:
            member.reduce(generation, vector_of(member.slot))
        return [member.hears(Reduced, generation=generation) for member in members]


def vector_of(slot: int, size: int = SIZE) -> Array:
    return np.random.default_rng(slot).standard_normal(size).astype(np.float32)


def assert_is_sum_of(results: list[Reduced], members: list[Member]) -> None:
    """All have the same bits, and they are those of exactly these members."""
    first = results[0]
    assert all(np.array_equal(result.vector, first.vector) for result in results)
    assert first.weight == len(members) == first.members
    wanted = sum(vector_of(member.slot, first.vector.size) for member in members)
    np.testing.assert_allclose(first.vector, wanted, atol=1e-5)


KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
