"""A whole run in virtual time: its processes, its network, its store, and a trace of what happened.

Nothing here reads a clock or draws an unseeded number; two worlds of the same seed have the same
trace to the last byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from dlctl import registry
from dlctl.config import JobFile
from dlctl.flat import slice_bounds
from dlctl.machine import Machine, Started
from dlctl.messages import Array
from dlctl.roles.agent import Agent
from dlctl.roles.arrivals import Past
from dlctl.roles.coordinator import Coordinator
from dlctl.roles.desk import COORDINATOR, Birth
from dlctl.roles.server import Server
from dlctl.roles.worker import Worker
from dlctl.sim.drivers import (
    SPAWN_S,
    ChildrenDriver,
    ComputeDriver,
    ComputeOptions,
    FilesDriver,
    RecordsDriver,
)
from dlctl.sim.network import Network, NetworkOptions
from dlctl.sim.problems import Problem
from dlctl.sim.process import Observer, Process
from dlctl.sim.store import Store
from dlctl.sim.timeline import Timeline

RUN_ID = "simulated-0000"
KEY = b"the key of a simulated run"
CONTROL = "sim://coordinator"
CLOCK_S_MAX = 1e5
"""How far the clocks of two processes may be apart."""


class World:
    """Everything that a run is made of. `start` it; all else follows from its processes' events."""

    def __init__(
        self,
        job: JobFile,
        problem: Problem,
        seed: int,
        network: NetworkOptions,
        compute: ComputeOptions,
        store: Store,
    ) -> None:
        self.job = job
        self.problem = problem
        self.compute = compute
        self.store = store
        self.timeline = Timeline()
        self.trace: list[str] = []
        streams = np.random.SeedSequence(seed).spawn(4)
        self._compute_rng, network_rng, self.fault_rng, self._clock_rng = (
            np.random.default_rng(stream) for stream in streams
        )
        self.network = Network(self.timeline, network, network_rng, self.note)
        self.observers: list[Observer] = []
        self.processes: list[Process] = []
        """Every process that there has been, in the order of their starts."""
        self.save_fails: Callable[[], str] = lambda: ""

    def note(self, text: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self.timeline.now:.6f} {text}")

    def digest(self) -> str:
        """SHA-256 of the trace: equal for equal seeds."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    # ------------------------------------------------------------ processes

    def process(self, name: str) -> Process:
        """The newest process of this name. Raises StopIteration if there was none."""
        return next(p for p in reversed(self.processes) if p.name == name)

    def machine(self, name: str) -> Any:
        """What runs in it; tests look inside."""
        return self.process(name).machine

    def living(self) -> list[str]:
        return [p.name for p in self.processes if p.alive]

    def start(self, past: Past) -> Process:
        """Start the coordinator; it has all others started."""
        process = self.new_process(COORDINATOR, 1)
        algorithm = registry.load("algorithms", self.job.algorithm.name)
        process.machine = Coordinator(RUN_ID, self.job, KEY, algorithm, past)
        RecordsDriver(process, self.store, self.spawn, self.note)
        self.network.listen(CONTROL, process)
        process.post(Started())
        return process

    def spawn(self, role: str, name: str, incarnation: int) -> Process:
        """Start a daemon as its `daemons/ROLE/__main__.py` does."""
        process = self.new_process(name, incarnation)
        pid = len(self.processes)
        birth = Birth(RUN_ID, role, name, incarnation, pid, "simulated", "0")
        make = {"agent": self._agent, "server": self._server, "worker": self._worker}[role]
        process.machine = make(process, birth)
        self.network.connect(process, COORDINATOR, CONTROL)
        process.post(Started(), SPAWN_S)
        return process

    def new_process(self, name: str, incarnation: int) -> Process:
        """A process without a machine yet."""
        clock_s = float(self._clock_rng.uniform(0, CLOCK_S_MAX))
        process = Process(name, incarnation, self.timeline, self.network, clock_s, self.note)
        process.observers = self.observers
        self.processes.append(process)
        self.note(f"{process} starts")
        return process

    def _agent(self, process: Process, birth: Birth) -> Machine:
        ChildrenDriver(process, self.spawn)
        return Agent(birth, self.job.timeouts.resend_s)

    def _server(self, process: Process, birth: Birth) -> Machine:
        FilesDriver(process, self.store, self.save_fails)
        address = f"sim://{birth.name}"
        self.network.listen(address, process)
        job = self.job
        return Server(
            birth,
            job,
            KEY,
            address,
            registry.load("algorithms", job.algorithm.name),
            registry.load("optimizers", job.optimizer.name),
            registry.load("compressors", job.compression.name),
        )

    def _worker(self, process: Process, birth: Birth) -> Machine:
        job = self.job
        FilesDriver(process, self.store, self.save_fails)
        ComputeDriver(
            process, self.problem, job.workers.batch_size, job.job.seed, self.compute,
            self._compute_rng,
        )  # fmt: skip
        compressor = registry.load("compressors", job.compression.name)
        return Worker(
            birth,
            job,
            registry.load("algorithms", job.algorithm.name),
            compressor(compressor.Options(**job.compression.options)),
        )

    # ------------------------------------------------------------ what befalls them

    def kill(self, name: str) -> None:
        """SIGKILL, if it lives."""
        process = self.process(name)
        if process.alive:
            process.end(-9)

    def freeze(self, name: str) -> None:
        self.process(name).freeze()

    def thaw(self, name: str) -> None:
        self.process(name).thaw()

    def weights(self) -> Array:
        """float32[d]: what the servers had at their last; NaN for a shard that never was."""
        size, count = self.problem.layout.size(), self.job.servers.count
        weights = np.full(size, np.nan, np.float32)
        for process in self.processes:
            serving = getattr(process.machine, "serving", None)
            if serving is not None:
                lo, hi = slice_bounds(size, count, serving.index)
                weights[lo:hi] = serving.shard.w
        return weights
