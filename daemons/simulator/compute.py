"""The compute threads of simulated workers: the code of `daemons/worker`, in virtual time.

Every worker has a replica of its own, and computes in the order in which its effects arrive. When
its work is over in virtual time, it is done in an instant of real time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from daemons.simulator.costs import Costs, Duration
from daemons.simulator.generators import Generators
from daemons.worker.ack_record import Acks
from daemons.worker.compute_thread import ComputeThread, Work
from daemons.worker.task.failures import failure_of
from dlctl import registry
from dlctl.job.config import JobFile
from dlctl.roles.protocol.effects import LocateTask, Settled, TaskLocated
from dlctl.sim.arrays import FilesDriver
from dlctl.sim.handling import Handling
from dlctl.sim.process import Process
from dlctl.wire.machine import Effect, Event
from dlctl.wire.messages import Register


class TorchCompute:
    """Makes workers' processes compute (`world.Computes`).

    directory: the simulated run's, for its stored code and its frozen parameters.
    """

    def __init__(
        self, job: JobFile, directory: Path, costs: Costs, handling: Handling | None = None
    ) -> None:
        self.job = job
        self.handling = handling
        self.directory = directory
        self.costs = costs
        self.generators = Generators()

    def __call__(self, process: Process, files: FilesDriver) -> None:
        slot = int(process.name.rpartition("-")[2])
        registration = Register(
            self.directory.name,
            "worker",
            process.name,
            process.incarnation,
            process.pid,
            "simulated",
            "0",
        )
        method = registry.load("algorithms", self.job.algorithm.name)
        queue = WorkQueue(process, slot, self.costs, self.generators, self.handling)
        place = (self.directory, registration)
        thread = ComputeThread(queue, self.job, place, method.shape, None, self.directory)
        queue.next_work = thread.next_work
        name, incarnation = process.name, process.incarnation
        acks = Acks(self.directory, name, incarnation, self.job.servers.count)
        process.perform(Settled, acks.write)
        process.perform(LocateTask, lambda _: process.post(TaskLocated("")))


class WorkQueue:
    """The loop of one simulated worker, as its compute thread sees it (`ComputeLoop`)."""

    def __init__(
        self,
        process: Process,
        slot: int,
        costs: Costs,
        generators: Generators,
        handling: Handling | None,
    ) -> None:
        """handling: None: the worker has a core of its own, and events take no time."""
        self._handling = handling
        self._thread = None if handling is None else handling.thread(process)
        self.next_work: Callable[[], Work]
        self._process = process
        self._slot = slot
        self._costs = costs
        self._generators = generators
        self._free_at = 0.0

    def perform(
        self, kind: type[Effect], how: Callable[[Any], object], *, anywhere: bool = False
    ) -> None:
        """how: queues the work of an effect; the process performs it when its time has come."""

        def begin(effect: Effect) -> None:
            how(effect)
            if not anywhere:
                return
            takes = self._costs.of(self._slot, effect)
            _, work = self.next_work()
            self._after(takes, lambda: self._do(work))

        self._process.perform(kind, begin)

    def _after(self, takes: Duration, do: Callable[[], None]) -> None:
        if self._thread is not None:
            self._thread.run(takes.cpu_s, do, sleeps_s=takes.sleeps_s)
            return
        timeline = self._process.timeline
        self._free_at = max(self._free_at, timeline.now) + takes.seconds
        timeline.at(self._free_at, do)

    def _do(self, work: Callable[[], Event | None]) -> None:
        process = self._process
        if not process.alive:
            return
        errors = np.geterr()
        with self._generators.of((process.name, process.incarnation)), np.errstate(**errors):
            try:
                event = work()
            except Exception as error:
                event = failure_of(error)
        if event is None:
            return
        if self._handling is None or self._thread is None:
            process.post(event)
        else:
            self._handling.offer(process, self._thread, event)

    def post(self, event: Event) -> None:
        self._process.post(event)

    def offer(self, event: Event) -> None:
        self._process.post(event)

    def fail(self, error: Exception) -> None:
        """A process of the replica is lost."""
        raise error
