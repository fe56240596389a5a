"""The faults of a simulated run, drawn from its seed, and when they are over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.crashpoints import PointCrash
from dlctl.sim.disk import SAVE_S
from dlctl.sim.process import Process
from dlctl.sim.supervision import still_s
from dlctl.sim.world import World
from dlctl.wire.machine import Effect, Peer, Send
from dlctl.wire.messages import Message

AGENT = "agent-0"
ROLES = ("agent", "server", "worker", COORDINATOR)
"""Prefixes of the names of a run's own processes."""
DAY_S = 86_400.0
ABOUT_AS_LONG = (0.8, 2.0)
"""Duration of a long freeze, as a fraction of the timeout of the frozen process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Kill `name` in the middle of an operation: when it sends the `count`-th message of type
    `kind` (which is still sent, or not, if `before`) or receives it (it is not handled)."""

    name: str
    kind: str
    count: int = 1
    direction: str = "sent"
    """"sent" or "received"."""
    before: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The number of each fault, at random times from `from_s` to `heal_at_s`; then all are healed.

    Loss, duplication and reordering of messages are network options; they too end at `heal_at_s`.
    Faults with a duration last for a random time, up to their number of seconds.
    """

    kills: int = 0
    """Workers killed."""
    server_kills: int = 0
    agent_kills: int = 0
    coordinator_kills: int = 0
    blackouts: int = 0
    """All processes of the run killed at once."""
    recoveries: int = 0
    """Kills of all processes; a while later the run is recovered from its persisted state."""
    recovery_s: float = 3.0
    freezes: int = 0
    """Workers and servers frozen."""
    control_freezes: int = 0
    """Agents and coordinators frozen."""
    freeze_s: float = 3.0
    long_freezes: int = 0
    """Daemons frozen for about as long as their timeout: some resume just in time, others are
    killed and replaced. They begin early; servers only if their state is persisted."""
    ghosts: int = 0
    """Workers that are given up and replaced while they are only frozen; they resume later."""
    ghost_s: float = 3.0
    cuts: int = 0
    """Links cut one way."""
    cut_s: float = 3.0
    partitions: int = 0
    """The daemons are partitioned into two groups."""
    partition_s: float = 3.0
    half_opens: int = 0
    """Connections that lose everything in one direction, until they are closed."""
    half_open_s: float = 3.0
    resets: int = 0
    """Connections broken, with their in-flight messages."""
    save_errors: float = 0.0
    """Probability that a file cannot be written."""
    full_disks: int = 0
    """Times in which no file can be written."""
    full_disk_s: float = 2.0
    forgotten: int = 0
    """Times in which no file can be written, and the coordinator is killed in the middle of each:
    its records since the disk was full are lost."""
    tight_disks: int = 0
    """Times in which there is room for small files only, and a server is killed in each."""
    slow_disks: int = 0
    """Times in which a file takes `slow_save_s`."""
    slow_disk_s: float = 2.0
    slow_save_s: float = 1.5
    clock_jumps: int = 0
    """The wall clock is set to another time, up to a day before or after."""
    moments: tuple[Moment, ...] = ()
    points: tuple[PointCrash, ...] = ()
    from_s: float = 0.5
    begin_until_s: float = math.inf
    """No fault begins later, although faults last until `heal_at_s`."""
    heal_at_s: float = 10.0


class Injector:
    """Schedules the faults of a world. All random numbers are drawn at its start, except for
    `save_errors`.

    `struck` counts effective faults: a kill of a dead worker is none.
    """

    def __init__(self, world: World, faults: Faults) -> None:
        self.world = world
        self.faults = faults
        self.struck: Counter[str] = Counter()
        job = world.job
        self._workers = [f"worker-{i}" for i in range(job.workers.count)]
        self._servers = [f"server-{k}" for k in range(job.servers.count)]
        self._daemons = [*self._workers, *self._servers, AGENT]

    def begin(self) -> None:
        faults = self.faults
        planned: list[tuple[int, Callable[[], object]]] = [
            (faults.kills, lambda: self._kill(self._workers)),
            (faults.freezes, lambda: self._freeze(self._workers + self._servers)),
            (faults.cuts, self._cut),
            (faults.resets, self._reset),
            (faults.server_kills, lambda: self._kill(self._servers)),
            (faults.agent_kills, lambda: self._kill([AGENT])),
            (faults.coordinator_kills, lambda: self._kill([COORDINATOR])),
            (faults.blackouts, lambda: self._at(self._when(), "blackout", self._kill_all)),
            (faults.control_freezes, lambda: self._freeze([AGENT, COORDINATOR])),
            (faults.ghosts, self._haunt),
            (faults.partitions, self._partition),
            (faults.half_opens, self._half_open),
            (faults.full_disks, self._fill_disk),
            (faults.slow_disks, self._slow_disk),
            (faults.clock_jumps, self._jump),
            (faults.forgotten, self._forget),
            (faults.tight_disks, self._tighten_disk),
            (faults.long_freezes, self._freeze_for_long),
            (faults.recoveries, self._recover),
        ]
        for count, plan in planned:
            for _ in range(count):
                plan()
        # Before the checkers: an effect that a kill prevents has not happened.
        self.world.observers[:0] = [KillAt(self.world, moment) for moment in faults.moments]
        self.world.crash_points.armed += faults.points
        self.world.disk.fails = self._save_fails
        self.world.timeline.at(faults.heal_at_s, self._heal)

    # ------------------------------------------------------------ random choices

    @property
    def _until_s(self) -> float:
        return min(self.faults.begin_until_s, self.faults.heal_at_s)

    def _when(self) -> float:
        return float(self.world.fault_rng.uniform(self.faults.from_s, self._until_s))

    def _one_of(self, names: list[str]) -> str:
        return names[int(self.world.fault_rng.integers(len(names)))]

    def _is_heads(self) -> bool:
        return bool(self.world.fault_rng.random() < 0.5)

    def _at(self, when_s: float, kind: str, do: Callable[[], None], name: str = "") -> None:
        """Schedule a fault; with a `name` only if that daemon is alive then."""

        def strike() -> None:
            if not name or name in self.world.living():
                self.struck[kind] += 1
                do()

        self.world.timeline.at(when_s, strike)

    def _while(
        self,
        kind: str,
        longest_s: float,
        begin: Callable[[], None],
        end: Callable[[], None],
        name: str = "",
    ) -> tuple[float, float]:
        """Schedule a fault with a duration; returns its start and end."""
        begun_s = self._when()
        ends = begun_s + longest_s * self.world.fault_rng.random()
        ends_s = min(float(ends), self.faults.heal_at_s)
        self._at(begun_s, kind, begin, name)
        self.world.timeline.at(ends_s, end)
        return begun_s, ends_s

    # ------------------------------------------------------------ processes

    def _kill(self, names: list[str]) -> None:
        name = self._one_of(names)
        self._at(self._when(), "kill", lambda: self.world.kill(name), name)

    def _kill_all(self) -> None:
        for process in list(self.world.processes):
            if process.alive and process.name.startswith(ROLES):
                process.end(-9)

    def _recover(self) -> None:
        world, rng = self.world, self.world.fault_rng
        after_s = float(rng.uniform(0.0, self.faults.recovery_s))

        def strike() -> None:
            if not world.over():
                self.struck["recovery"] += 1
                self._kill_all()
                world.recover(after_s)

        world.timeline.at(self._when(), strike)

    def _freeze(self, names: list[str]) -> None:
        name = self._one_of(names)
        self._while("freeze", self.faults.freeze_s, *self._freezing(name), name)

    def _freezing(self, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """Thaw the same process that was frozen: by then another one may have its name."""
        world = self.world
        frozen: list[Process] = []

        def freeze() -> None:
            frozen.append(world.process(name))
            world.freeze(name)

        def thaw() -> None:
            for process in frozen:
                process.thaw()

        return freeze, thaw

    def _freeze_for_long(self) -> None:
        faults, job, rng = self.faults, self.world.job, self.world.fault_rng
        kept = self._servers if job.servers.durability != "none" else []
        name = self._one_of([*self._workers, *kept, AGENT, COORDINATOR])
        silent_s = job.timeouts.silent_s
        limit_s = still_s(silent_s) if name == COORDINATOR else silent_s
        begun_s = float(rng.uniform(faults.from_s, (faults.from_s + self._until_s) / 2))
        ends_s = begun_s + limit_s * float(rng.uniform(*ABOUT_AS_LONG))
        freeze, thaw = self._freezing(name)
        self._at(begun_s, "long freeze", freeze, name)
        self.world.timeline.at(min(ends_s, faults.heal_at_s), thaw)

    def _haunt(self) -> None:
        name, world = self._one_of(self._workers), self.world
        ghosts: list[Process] = []

        def give_up() -> None:
            ghosts.append(world.process(name))
            world.give_up(name)

        def come_back() -> None:
            for ghost in ghosts:
                ghost.thaw()

        self._while("ghost", self.faults.ghost_s, give_up, come_back, name)

    # ------------------------------------------------------------ the network

    def _neighbours(self) -> tuple[str, str]:
        """A daemon, and one that it connects to."""
        one = self._one_of(self._daemons)
        has_server = one in self._workers and self._servers
        return one, self._one_of(self._servers) if has_server else COORDINATOR

    def _cut(self) -> None:
        one, other = self._neighbours()
        self._cut_links(
            "cut", self.faults.cut_s, [(one, other) if self._is_heads() else (other, one)]
        )

    def _partition(self) -> None:
        group = {name for name in [*self._daemons, COORDINATOR] if self._is_heads()}
        others = {*self._daemons, COORDINATOR} - group
        links = [(a, b) for a in sorted(group) for b in sorted(others)]
        links += [(b, a) for a, b in links]
        if links:
            self._cut_links("partition", self.faults.partition_s, links)

    def _cut_links(self, kind: str, longest_s: float, links: list[tuple[str, str]]) -> None:
        def cut() -> None:
            for link in links:
                self.world.network.cut(*link)

        def heal() -> None:
            for link in links:
                self.world.network.heal(*link)

        self._while(kind, longest_s, cut, heal)

    def _half_open(self) -> None:
        client, peer = self._neighbours()
        upward, network = self._is_heads(), self.world.network
        self._while(
            "half-open",
            self.faults.half_open_s,
            lambda: network.half_open(client, peer, upward=upward),
            lambda: network.reset(client),
        )

    def _reset(self) -> None:
        name = self._one_of(self._daemons)
        self._at(self._when(), "reset", lambda: self.world.network.reset(name))

    # ------------------------------------------------------------ disks and clocks

    def _fill_disk(self) -> tuple[float, float]:
        disk = self.world.disk

        def fill(by: int) -> None:
            disk.full += by

        return self._while("full disk", self.faults.full_disk_s, lambda: fill(1), lambda: fill(-1))

    def _forget(self) -> None:
        full_s = self._fill_disk()
        dies_s = float(self.world.fault_rng.uniform(*full_s))
        self._at(dies_s, "forgotten", lambda: self.world.kill(COORDINATOR), COORDINATOR)

    def _tighten_disk(self) -> None:
        disk = self.world.disk

        def tighten(by: int) -> None:
            disk.tight += by

        tight_s = self._while(
            "tight disk", self.faults.full_disk_s, lambda: tighten(1), lambda: tighten(-1)
        )
        name, dies_s = self._one_of(self._servers), float(self.world.fault_rng.uniform(*tight_s))
        self._at(dies_s, "kill", lambda: self.world.kill(name), name)

    def _slow_disk(self) -> None:
        disk, slow_s = self.world.disk, self.faults.slow_save_s

        def take(seconds: float) -> None:
            disk.save_s = seconds

        self._while(
            "slow disk", self.faults.slow_disk_s, lambda: take(slow_s), lambda: take(SAVE_S)
        )

    def _jump(self) -> None:
        jump_s = float(self.world.fault_rng.uniform(-DAY_S, DAY_S))

        def jump() -> None:
            self.world.wall_jumped_s += jump_s

        self._at(self._when(), "clock jump", jump)

    def _save_fails(self) -> bool:
        faults, world = self.faults, self.world
        if not faults.save_errors or world.timeline.now >= faults.heal_at_s:
            return False
        return bool(world.fault_rng.random() < faults.save_errors)

    def _heal(self) -> None:
        self.world.network.healed = True
        disk = self.world.disk
        disk.full, disk.tight, disk.save_s = 0, 0, SAVE_S
        self.world.note("all faults are healed")


class KillAt:
    """Kills a process at a moment."""

    def __init__(self, world: World, moment: Moment) -> None:
        self.world = world
        self.moment = moment
        self._seen = 0

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Send) and self._is_it(process, effect.message, "sent"):
            if self.moment.before:
                process.end(-9)
            else:
                self.world.timeline.after(0.0, lambda: process.end(-9))

    def on_message(self, process: Process, peer: Peer, message: Message) -> None:
        if self._is_it(process, message, "received"):
            process.end(-9)

    def _is_it(self, process: Process, message: Message, direction: str) -> bool:
        moment = self.moment
        if (process.name, type(message).__name__) != (moment.name, moment.kind):
            return False
        if direction != moment.direction:
            return False
        self._seen += 1
        return self._seen == moment.count
