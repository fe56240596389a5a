"""A whole run in virtual time: its processes, its network, its store, and a trace of what happened.

Nothing here reads a clock or draws an unseeded number; two worlds of the same seed have the same
trace to the last byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dlctl import registry
from dlctl.job.config import Choice, JobFile
from dlctl.model.parts import Division
from dlctl.roles.agent.agent import Agent
from dlctl.roles.agent.guest import Guest
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.protocol.context import COORDINATOR, EXIT_RESTART
from dlctl.roles.protocol.effects import CoordinatorGone, RestartCoordinator
from dlctl.roles.server.server import Server
from dlctl.roles.worker.interface import MakeSteps
from dlctl.roles.worker.services.computing import Computing
from dlctl.roles.worker.services.looping import Looping
from dlctl.roles.worker.worker import Worker
from dlctl.runs.database import ENDED
from dlctl.sim import hostfiles
from dlctl.sim.arrays import FilesDriver
from dlctl.sim.batch_hosts import BatchHosts
from dlctl.sim.crashpoints import CrashPoints
from dlctl.sim.disk import Disk
from dlctl.sim.drivers import (
    REAP_S,
    SPAWN_S,
    ChildrenDriver,
    ComputeDriver,
    ComputeOptions,
    Inner,
    RecordsDriver,
    plain_inner,
)
from dlctl.sim.group import GroupDriver, SimGroups
from dlctl.sim.handling import Handling
from dlctl.sim.keys import SimulatedKeys
from dlctl.sim.network import NetworkOptions, SimNetwork
from dlctl.sim.objectives import Objective
from dlctl.sim.process import Observer, Process
from dlctl.sim.questions import Divided
from dlctl.sim.shared_models import SharedModels
from dlctl.sim.states import CommitDriver, KeptStates
from dlctl.sim.store import Store
from dlctl.sim.supervision import SimSupervision
from dlctl.sim.timeline import Timeline
from dlctl.util.names import HOME_AGENT
from dlctl.wire.machine import Machine, Started, StopRequested
from dlctl.wire.messages import Array, Json, Register, Spawned

RUN_ID = "simulated-0000"
KEY = b"the key of a simulated run"
CONTROL = "sim://coordinator"
CLOCK_S_MAX = 1e5
"""How far the clocks of two processes may be apart."""
WALL_S = 1_750_000_000.0
"""The wall clock when a simulation begins: June 2025, in seconds since 1970."""
PID_FIRST = 1000
RESTART_S = 1.0
"""From the request to restart a coordinator to its first event."""


Computes = Callable[[Process, FilesDriver], None]
"""Makes a worker's process perform the effects that compute: gradients, evaluations, states."""


class World:
    """All components of a run. Call `start`; all else follows from the processes' events."""

    def __init__(
        self,
        job: JobFile,
        objective: Objective | Computes,
        seed: int,
        network: NetworkOptions,
        compute: ComputeOptions,
        store: Store,
        inner: Callable[[Choice], Inner | None] = plain_inner,
        handling: Handling | None = None,
    ) -> None:
        """objective: what the workers compute, in numpy; or who computes it. handling: None: events
        are handled in no time.
        """
        self.handling = handling
        self.job = job
        self.inner = inner
        self._computes = objective if callable(objective) else self._compute_objective
        self._objective = objective
        self.compute = compute
        self.store = store
        self.timeline = Timeline()
        self.trace: list[str] = []
        self.is_traced = True
        streams = np.random.SeedSequence(seed).spawn(4)
        self._compute_rng, network_rng, self.fault_rng, self._clock_rng = (
            np.random.default_rng(stream) for stream in streams
        )
        self.network = SimNetwork(self.timeline, network, network_rng, self.note)
        self.observers: list[Observer] = []
        self.groups = SimGroups(np.random.default_rng([seed, 12]))
        self.shared_models = SharedModels()
        self.processes: list[Process] = []
        """Every process so far, in the order of their starts."""
        self.coordinator: Process
        """The newest one."""
        self.disk = Disk()
        self.host_disks = hostfiles.HostDisks()
        self.crash_points = CrashPoints()
        self.wall_jumped_s = 0.0
        """Seconds by which the wall clock was set forward. Only records show it."""
        self.unreachable: set[str] = set()
        """Agents on whose hosts no process can be started now."""
        self.batch = BatchHosts(self)
        self._orphans: set[Process] = set()
        self._guests = 0
        """Processes of `dlctl join` so far; a newer one has a larger incarnation."""
        self._restarts = 0
        """Coordinators that are being started."""

    def note(self, text: str) -> None:
        """A line of the trace."""
        if self.is_traced:
            self.trace.append(f"{self.timeline.now:.6f} {text}")

    def digest(self) -> str:
        """SHA-256 of the trace: equal for equal seeds."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    @property
    def objective(self) -> Objective:
        """What the workers compute. Raises AssertionError if that is not in numpy."""
        assert not callable(self._objective), "the workers compute no objective"
        return self._objective

    @property
    def keys(self) -> SimulatedKeys:
        """The run's current key file."""
        return SimulatedKeys(KEY, self.store.key_number)

    # ------------------------------------------------------------ processes

    def process(self, name: str) -> Process:
        """The newest process of this name. Raises StopIteration if there was none."""
        return next(p for p in reversed(self.processes) if p.name == name)

    def machine(self, name: str) -> Any:
        """The machine of this process; for tests."""
        return self.process(name).machine

    def living(self, role: str = "") -> list[str]:
        """Names of the living processes, of one role or of all."""
        return [p.name for p in self.processes if p.alive and p.name.startswith(role)]

    def children(self, *roles: str) -> list[Process]:
        """The living processes of some roles, which a new agent or coordinator finds."""
        return [p for p in self.processes if p.alive and p.name.partition("-")[0] in roles]

    def wall_s(self) -> float:
        """Seconds since 1970 by the clocks of all hosts of the run. No role can ask for it."""
        return WALL_S + self.timeline.now + self.wall_jumped_s

    def over(self) -> bool:
        """Whether the coordinator is gone for good: it left, or no agent can restart it."""
        coordinator = self.coordinator
        if coordinator.alive or self._restarts:
            return False
        left = coordinator.exit_code not in (None, EXIT_RESTART)
        return left or HOME_AGENT not in self.living()

    def start(self, past: Past, incarnation: int = 1) -> Process:
        """Start the coordinator; it starts all other daemons, or finds the living ones."""
        keys = self.keys
        secret = keys.secret(COORDINATOR)
        self.coordinator = process = self.new_process(COORDINATOR, incarnation, secret)
        process.coordinator_key = keys.public(COORDINATOR)
        algorithm = registry.load("algorithms", self.job.algorithm.name)
        past = replace(past, wall_s=self.wall_s())
        process.machine = Coordinator(RUN_ID, self.job, keys, algorithm, past)
        process.ended = self._coordinator_ended
        records = RecordsDriver(
            process, self.store, self.spawn, self.note, self.wall_s, self.unreachable, self.disk,
            self.batch,
        )  # fmt: skip
        hostfiles.coordinate(process, self.store, self.disk)
        for agent in self.children("agent"):
            records.adopt(agent)
        self.network.listen(CONTROL, process)
        process.post(Started())
        return process

    def end_orphans(self) -> None:
        """Stop daemons whose agent and coordinator are gone (`daemons/parent_watch.py`)."""
        if self.coordinator.alive or HOME_AGENT in self.living():
            return
        for orphan in self.children("server", "worker"):
            if orphan not in self._orphans and not orphan.agent.startswith("guest"):
                self._orphans.add(orphan)
                orphan.post(StopRequested("the agent and the coordinator are gone"), REAP_S)

    def _coordinator_ended(self, status: int) -> None:
        if self.coordinator.exit_code in (None, EXIT_RESTART):
            for agent in self.children("agent"):
                if agent.name == HOME_AGENT:
                    agent.post(CoordinatorGone(), REAP_S)

    def restart_coordinator(
        self,
        past: Callable[[], Past],
        delay_s: float = RESTART_S,
        *,
        needs_space: bool = False,
    ) -> None:
        """Start another coordinator a while from now, unless one lives then; with `needs_space`,
        not before the disk has space. `past` is asked for what it finds at that moment.
        """
        self._restarts += 1

        def begin() -> None:
            if needs_space and self.disk.full:
                self.timeline.after(RESTART_S, begin)
                return
            self._restarts -= 1
            if not self.coordinator.alive:
                self.start(past(), self.coordinator.incarnation + 1)

        self.timeline.after(delay_s, begin)

    def recover(self, after_s: float) -> None:
        """Recover a run without any processes, as `dlctl recover` does: the next coordinator finds
        the last one's records, and servers their persisted state. Not a run that has ended.
        """
        if self.store.run.get("state") not in ENDED:
            self.restart_coordinator(self.past, after_s, needs_space=True)

    def spawn(
        self, role: str, name: str, incarnation: int, secret: str, coordinator_key: str
    ) -> Process:
        """Start a daemon as its `daemons/*/__main__.py` does."""
        process = self.new_process(name, incarnation, secret)
        process.coordinator_key = coordinator_key
        process.agent = name if role in ("agent", "guest") else HOME_AGENT
        registration = Register(RUN_ID, role, name, incarnation, process.pid, "simulated", "0")
        makers = {
            "agent": self._agent, "guest": self._guest, "server": self._server,
            "worker": self._worker,
        }  # fmt: skip
        process.write_log(f"INFO {name} starts, pid {process.pid}")
        process.machine = makers[role](process, registration)
        self.network.connect(process, COORDINATOR, CONTROL, coordinator_key)
        process.post(Started(), SPAWN_S)
        return process

    def new_process(self, name: str, incarnation: int, secret: str) -> Process:
        """A process without a machine yet."""
        clock_s = float(self._clock_rng.uniform(0, CLOCK_S_MAX))
        pid = PID_FIRST + len(self.processes)
        process = Process(
            name, incarnation, self.timeline, self.network, clock_s, self.note, pid, secret
        )
        process.observers = self.observers
        if self.handling is not None:
            self.handling.take_over(process)
        self.processes.append(process)
        self.note(f"{process} starts")
        return process

    def _agent(self, process: Process, registration: Register) -> Machine:
        driver = ChildrenDriver(process, self.spawn)
        adopted = [c for c in self.children("server", "worker") if c.agent == process.name]
        for child in adopted:
            driver.adopt(child)
        if process.name == HOME_AGENT:
            self._supervise(process)
        disk = self.host_disks.of(process.name)
        find = hostfiles.on_host(disk, self.processes)
        hostfiles.OutgoingDriver(process, find, partial(self.host_disks.remove, process.name))
        found = tuple(Spawned(c.name, c.incarnation, c.pid) for c in adopted)
        return Agent(registration, self.job.timeouts.resend_s, found)

    def join_guest(self, invitation: Json) -> Process:
        """`dlctl join`, with what `dlctl keys invite` has written."""
        self._guests += 1
        name = f"guest-{invitation['worker'].partition('-')[2]}"
        secret, key = invitation["secret"], invitation["coordinator"]
        return self.spawn("guest", name, self._guests, secret, key)

    def _guest(self, process: Process, registration: Register) -> Machine:
        driver = ChildrenDriver(process, self.spawn)
        find = hostfiles.on_host(self.host_disks.of(process.name), self.processes)
        hostfiles.OutgoingDriver(process, find, partial(self.host_disks.remove, process.name))
        # A second process with the same invitation has a worker of its own.
        process.ended = lambda _: driver.end_all("its guest is gone")
        return Guest(registration, self.job.timeouts.resend_s)

    def _supervise(self, agent: Process) -> None:
        """An agent detects the coordinator's exit, and starts the next one; it terminates a
        coordinator that is stopped.
        """
        SimSupervision(agent, lambda: self.coordinator, self.job.timeouts.silent_s)
        agent.perform(RestartCoordinator, lambda _: self.restart_coordinator(self.past))
        if not self.coordinator.alive:
            agent.post(CoordinatorGone())

    def past(self) -> Past:
        """What a coordinator finds that replaces one that died."""
        agents = {p.name: p.incarnation for p in self.children("agent") if p.name == HOME_AGENT}
        return self.store.past(agents=agents)

    def _server(self, process: Process, registration: Register) -> Machine:
        FilesDriver(process, self.store, self.disk, self.host_disks)
        CommitDriver(process, self.disk)
        address = f"sim://{registration.name}"
        if self.network.options.free_ports:
            address += f":{registration.incarnation}"
        self.network.listen(address, process)
        job = self.job
        return Server(
            registration,
            job,
            address,
            registry.load("algorithms", job.algorithm.name),
            registry.load("optimizers", job.optimizer.name),
            registry.load("compressors", job.compression.name),
            KeptStates(
                process,
                self.store.states,
                job.servers.durability,
                self.crash_points.hook(process),
                self.disk,
            ),
        )

    def _worker(self, process: Process, registration: Register) -> Machine:
        job = self.job
        self._computes(process, FilesDriver(process, self.store, self.disk, self.host_disks))
        method = registry.load("algorithms", job.algorithm.name)
        if "group" in method.shape.links:
            GroupDriver(process, self.groups)
        address = ""
        if "peers" in method.shape.links:
            address = f"sim://{registration.name}"
            self.network.listen(address, process)
        compressor = registry.load("compressors", job.compression.name)
        return Worker(
            registration,
            job,
            method,
            compressor(compressor.Options(**job.compression.options)),
            address,
            steps=self._looping if job.has_loop else Computing,
        )

    def _compute_objective(self, process: Process, files: FilesDriver) -> None:
        job = self.job
        method = registry.load("algorithms", job.algorithm.name)
        lead = method.lead(method.Options(**job.algorithm.options))
        division, slot = Division(method.shape.parts, job), int(process.name.rpartition("-")[2])
        whole = self.objective
        objective = whole.parts[division.number(slot)] if isinstance(whole, Divided) else whole
        ComputeDriver(
            process, objective, job.job.seed, self.compute,
            self._compute_rng, job.algorithm.name, method.shape.twin or division.of(slot).twin,
            method.Options(**job.algorithm.options), self.inner(job.inner),
            files=files, cohort=lead.cohort,
            memory=self.shared_models if "memory" in method.shape.links else None,
            has_loop=job.has_loop, accumulate=job.gradient.accumulate,
        )  # fmt: skip

    @property
    def _looping(self) -> MakeSteps:
        return partial(Looping, has_own_data=bool(self.compute.loop.own_samples))

    # ------------------------------------------------------------ faults

    def cut_off(self, agent: str) -> None:
        """A host loses all its links to the others, both ways."""
        self.note(f"the host of {agent} is cut off")
        self.unreachable.add(agent)
        self.network.away.add(agent)

    def join(self, agent: str) -> None:
        self.note(f"the host of {agent} is back")
        self.unreachable.discard(agent)
        self.network.away.discard(agent)

    def lose_host(self, agent: str) -> None:
        """A host is gone for good, with all its processes."""
        self.cut_off(agent)
        for process in list(self.processes):
            if process.alive and process.agent == agent:
                process.end(-9)

    def kill(self, name: str) -> None:
        """SIGKILL, if it is alive."""
        process = self.process(name)
        if process.alive:
            process.end(-9)

    def give_up(self, name: str) -> None:
        """Make a host unreachable: its agent sees the exit of the process, which is only frozen."""
        process = self.process(name)
        if process.alive and not process.given_up:
            self.note(f"{process} is given up")
            process.freeze()
            process.given_up = True
            process.ended(-9)
            process.ended = lambda status: None

    def freeze(self, name: str) -> None:
        self.process(name).freeze()

    def thaw(self, name: str) -> None:
        self.process(name).thaw()

    def weights(self) -> Array:
        """float32[d]: the servers' last parameters; NaN for a shard that never existed. Without
        servers, those of the newest process of the first worker. Empty if nobody knows d.
        """
        if not self.job.servers.count:
            machines = [p.machine for p in self.processes if p.name == "worker-0"]
            found = [t for t in (getattr(m, "training", None) for m in machines) if t is not None]
            return found[-1].side.parameters.copy() if found else self._unknown()
        weights = self._unknown()
        # Of each server the newest process: an earlier one may have had another part of the model.
        newest = {p.name: p for p in self.processes if getattr(p.machine, "serving", None)}
        for process in newest.values():
            serving = getattr(process.machine, "serving", None)
            if serving is not None:
                size, shard = serving.assigned.bounds[-1], serving.parameters
                weights = weights if weights.size == size else np.full(size, np.nan, np.float32)
                weights[shard.lo : shard.hi] = shard.shard.w
        return weights

    def _unknown(self) -> Array:
        size = 0 if callable(self._objective) else self._objective.layout.size()
        return np.full(size, np.nan, np.float32)
