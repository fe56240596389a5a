"""The entry point of the simulator: run a job with an objective and a seed, inspect the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dlctl.job.config import Choice, JobFile
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.protocol.authz import CLIENT
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import Checker
from dlctl.sim.client import Client
from dlctl.sim.drivers import ComputeOptions, Inner, plain_inner
from dlctl.sim.faults import Faults, Injector
from dlctl.sim.handling import Handling
from dlctl.sim.network import NetworkOptions, SimNetwork
from dlctl.sim.objectives import Objective
from dlctl.sim.store import Store
from dlctl.sim.world import CONTROL, Computes, World
from dlctl.wire.machine import Started
from dlctl.wire.messages import Array, Json

AFTERWARDS_S = 120.0
"""After the coordinator's exit: processes that are still alive then were left behind."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a simulated run. Everything in it is simulated, times included."""

    state: str
    """finished, stopped or failed; "" if the time ran out."""
    reason: str
    weights: Array
    """float32[d], the servers' final parameters."""
    seconds: float
    """Virtual time until the last coordinator's exit."""
    trace: list[str]
    digest: str
    network: SimNetwork
    """Messages and bytes by type, lost and duplicate messages."""
    store: Store
    left_behind: list[str]
    """Processes that outlived their run."""
    world: World


class Simulation:
    """One execution of a run. `store` has the state of an earlier execution of the same run.

    `at` schedules a function; `run` continues until the run is over.
    """

    def __init__(
        self,
        job: JobFile,
        objective: Objective | Computes,
        seed: int = 0,
        *,
        network: NetworkOptions | None = None,
        compute: ComputeOptions | None = None,
        faults: Faults | None = None,
        store: Store | None = None,
        past: Past | None = None,
        checkers: tuple[Checker, ...] = (),
        inner: Callable[[Choice], Inner | None] = plain_inner,
        handling: Handling | None = None,
    ) -> None:
        """objective: what the workers compute, in numpy; or who computes it. inner: creates the
        replicas' own optimisers. handling: what events cost their daemons; None: nothing.
        """
        self.store = store if store is not None else Store()
        self.world = World(
            job,
            objective,
            seed,
            network or NetworkOptions(),
            compute or ComputeOptions(),
            self.store,
            inner,
            handling,
        )
        self.checkers = checkers
        self.world.observers += checkers
        for checker in checkers:
            checker.at_start(self.world)
        if past is None:
            past = self.store.past()
            self.store.memory.clear()
            self.store.states.clear()  # As `dlctl start`: resume from a checkpoint, or start over.
        self._past = past
        self.injector = Injector(self.world, faults or Faults())
        self._requests = 0

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        self.world.timeline.at(when_s, do)

    def request(self, when_s: float, verb: str, arguments: Json) -> Client:
        """Schedule a command line's request to the coordinator."""
        self._requests += 1
        client = Client(self._requests, verb, arguments)

        def ask() -> None:
            keys = self.world.keys
            name, secret = f"client-{client.request.request}", keys.secret(CLIENT)
            process = self.world.new_process(name, 1, secret)
            process.machine = client
            key = keys.public(COORDINATOR)
            self.world.network.connect(process, COORDINATOR, CONTROL, key)
            process.post(Started())

        self.at(when_s, ask)
        return client

    def _begin(self) -> None:
        if not self.world.processes:
            self.injector.begin()
            self.world.start(self._past)

    def run(self, until_s: float = 3600.0) -> Outcome:
        """Run to the end, or to `until_s`; then it may be called again with a later time.

        Raises AssertionError if a checker finds a violated invariant.
        """
        world = self.world
        self._begin()
        while not world.over() and world.timeline.step(until_s):
            pass
        seconds, ended = world.timeline.now, world.over()
        while ended and world.living() and world.timeline.step(seconds + AFTERWARDS_S):
            world.end_orphans()
        for checker in self.checkers if ended else ():
            checker.at_end(world)
        run = self.store.run
        return Outcome(
            state=run.get("state", "") if ended else "",
            reason=run.get("reason", ""),
            weights=world.weights(),
            seconds=seconds,
            trace=world.trace,
            digest=world.digest(),
            network=world.network,
            store=self.store,
            left_behind=world.living(),
            world=world,
        )
