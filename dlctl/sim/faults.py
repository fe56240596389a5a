"""What goes wrong in a simulated run, drawn from its seed, and when all of it is over."""

from __future__ import annotations

from dataclasses import dataclass

from dlctl.machine import Effect, Peer, Send
from dlctl.messages import Message
from dlctl.roles.desk import COORDINATOR
from dlctl.sim.process import Process
from dlctl.sim.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Kill `name` in the middle of something: when the `count`-th message of type `kind` is sent by
    it (the message still goes out, or not, if `before`) or has reached it (it is not handled)."""

    name: str
    kind: str
    count: int = 1
    direction: str = "sent"
    """"sent" or "received"."""
    before: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How many of each, at random times from `from_s` to `heal_at_s`; then all is well again.

    Loss, repetition and reordering of messages stand in the network's options; they too end at
    `heal_at_s`.
    """

    kills: int = 0
    """Workers killed."""
    freezes: int = 0
    """Workers and servers frozen, each for a time of up to `freeze_s`."""
    freeze_s: float = 3.0
    cuts: int = 0
    """Links cut one way, each for up to `cut_s`."""
    cut_s: float = 3.0
    resets: int = 0
    """Connections broken, with what was under way on them."""
    save_errors: float = 0.0
    """Probability that a file cannot be written."""
    moments: tuple[Moment, ...] = ()
    from_s: float = 0.5
    heal_at_s: float = 10.0


class Injector:
    """Plans the faults of a world. All dice are thrown when it begins, but for those of saving."""

    def __init__(self, world: World, faults: Faults) -> None:
        self.world = world
        self.faults = faults
        job = world.job
        self._workers = [f"worker-{i}" for i in range(job.workers.count)]
        self._servers = [f"server-{k}" for k in range(job.servers.count)]

    def begin(self) -> None:
        faults, at, when = self.faults, self.world.timeline.at, self._when
        for _ in range(faults.kills):
            name = self._one_of(self._workers)
            at(when(), lambda name=name: self._if_there(name, self.world.kill))  # type: ignore[misc]
        for _ in range(faults.freezes):
            self._freeze(self._one_of(self._workers + self._servers), when(), faults.freeze_s)
        for _ in range(faults.cuts):
            self._cut(when(), faults.cut_s)
        for _ in range(faults.resets):
            name = self._one_of([*self._workers, *self._servers, "agent-0"])
            at(when(), lambda name=name: self.world.network.reset(name))  # type: ignore[misc]
        self.world.observers += [KillAt(self.world, moment) for moment in faults.moments]
        self.world.save_fails = self._save_fails
        at(faults.heal_at_s, self._heal)

    def _when(self) -> float:
        return float(self.world.fault_rng.uniform(self.faults.from_s, self.faults.heal_at_s))

    def _one_of(self, names: list[str]) -> str:
        return names[int(self.world.fault_rng.integers(len(names)))]

    def _until(self, begun_s: float, longest_s: float) -> float:
        ends = begun_s + longest_s * self.world.fault_rng.random()
        return min(float(ends), self.faults.heal_at_s)

    def _if_there(self, name: str, do: object) -> None:
        if name in self.world.living():
            do(name)  # type: ignore[operator]

    def _freeze(self, name: str, begun_s: float, longest_s: float) -> None:
        at = self.world.timeline.at
        at(begun_s, lambda: self._if_there(name, self.world.freeze))
        at(self._until(begun_s, longest_s), lambda: self._if_there(name, self.world.thaw))

    def _cut(self, begun_s: float, longest_s: float) -> None:
        names = [*self._workers, *self._servers, "agent-0"]
        one = self._one_of(names)
        other = self._one_of(self._servers) if one in self._workers else COORDINATOR
        ends = (one, other) if self.world.fault_rng.random() < 0.5 else (other, one)
        network, at = self.world.network, self.world.timeline.at
        at(begun_s, lambda: network.cut(*ends))
        at(self._until(begun_s, longest_s), lambda: network.heal(*ends))

    def _save_fails(self) -> str:
        faults, world = self.faults, self.world
        if not faults.save_errors or world.timeline.now >= faults.heal_at_s:
            return ""
        fails = world.fault_rng.random() < faults.save_errors
        return "no space left on device" if fails else ""

    def _heal(self) -> None:
        self.world.network.healed = True
        self.world.note("all faults are healed")


class KillAt:
    """Waits for a moment and kills."""

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
