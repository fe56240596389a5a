"""A window of a run without gradients: where many workers would wait (`simulate --protocol`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from daemons.simulator.costs import Costs, Durations
from daemons.simulator.no_training import NoTraining
from daemons.simulator.sums import RingSums
from daemons.simulator.surroundings import handling_of, network_of
from dlctl import registry
from dlctl.job.config import JobFile, Stop
from dlctl.sim.fabric import CardQueues
from dlctl.sim.request import SimulationRequest
from dlctl.sim.simulation import Simulation
from dlctl.wire.messages import Json

STAND_IN, TO_CHOOSE_FROM = 64, 1024
"""Elements of the stand-in vector for each server; where a compressor chooses some of them."""
START_S_MAX = 3600.0
"""Virtual seconds within which all workers must train."""
CHUNK_S = 0.25
"""Virtual seconds between two looks at the clock."""
ROLES = ("coordinator", "server", "worker")
SECONDS_MAX = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class _Look:
    """How far it is at a moment."""

    now: float
    steps: int


@dataclass(frozen=True, slots=True)
class _Mark(_Look):
    """All counts."""

    messages: int
    loops: Mapping[str, float]
    """Daemon -> CPU seconds of its loop."""
    cards: Mapping[tuple[str, str], float]
    """(machine, direction) -> seconds that its card was busy."""


class ProtocolRun:
    """until_cpu_s: `time.process_time` after which it goes no further."""

    def __init__(self, request: SimulationRequest, job: JobFile, until_cpu_s: float) -> None:
        self._began_s = time.process_time()
        costs = Costs(Durations.of_request(request), request.seed)
        job, each = _stand_in(job, request.parameters)
        size = each * max(1, job.servers.count)
        scale = request.parameters / size
        self._until_cpu_s = until_cpu_s
        self._request = request
        self._workers = job.workers.count
        self._handling = handling_of(request, job, scale)
        self._computes = NoTraining(size, costs, self._handling)
        self._simulation = Simulation(
            _endless(job), self._computes, request.seed, network=network_of(request, scale),
            handling=self._handling,
        )  # fmt: skip
        self._simulation.world.is_traced = False
        self._simulation.world.groups.costs = RingSums(self._handling, costs, request.link)

    def window(self) -> Json:
        """Let all workers begin, and then simulate the window, or as much as there is time for."""
        timeline = self._simulation.world.timeline
        while len(self._computes.trained) < self._workers and timeline.now < START_S_MAX:
            if not self._advance(CHUNK_S):
                break
        start_s, first = timeline.now, self._mark()
        looks: list[_Look] = [first]
        is_whole = self._advance(self._request.until_s, looks)
        last = self._mark()
        return {
            "workers": self._workers,
            "cores": self._request.cores,
            "trained": len(self._computes.trained),
            "start_s": start_s,
            "seconds": last.now - first.now,
            "is_whole": is_whole,
            "steps_per_s": _rate(first, last),
            "halves": _halves(looks),
            "messages_per_s": (last.messages - first.messages) / max(1e-9, last.now - first.now),
            "busy": self._busy(first, last),
            "cpu_s": time.process_time() - self._began_s,
        }

    def _advance(self, seconds: float, looks: list[_Look] | None = None) -> bool:
        """Whether it came that far. looks: gets one of each time that the clock was looked at."""
        timeline = self._simulation.world.timeline
        until = timeline.now + seconds
        while timeline.now < until - 1e-6:
            if time.process_time() > self._until_cpu_s:
                return False
            before = timeline.now
            self._simulation.run(min(until, timeline.now + CHUNK_S))
            timeline.now = max(timeline.now, min(until, before + CHUNK_S))
            if looks is not None:
                looks.append(_Look(timeline.now, self._computes.steps))
        return True

    def _mark(self) -> _Mark:
        world = self._simulation.world
        fabric = world.network.fabric
        return _Mark(
            world.timeline.now, self._computes.steps, sum(world.network.messages.values()),
            self._handling.busy_s(), fabric.busy_s() if isinstance(fabric, CardQueues) else {},
        )  # fmt: skip

    def _busy(self, first: _Mark, last: _Mark) -> dict[str, Json]:
        """What is busiest of each kind: its name, and the share of the window. A worker's own link
        is a kind of its own: more workers do not load it.
        """
        took_s = max(1e-9, last.now - first.now)
        found: dict[str, Json] = {}
        for role in ROLES:
            shares = {
                name: (used - first.loops.get(name, 0.0)) / took_s
                for name, used in last.loops.items()
                if name.partition("-")[0] == role
            }
            _put_busiest(found, role, shares)
        for kind, is_own in (("link", False), ("own_link", True)):
            shares = {
                f"{name} {way}": (busy_s - first.cards.get((name, way), 0.0)) / took_s
                for (name, way), busy_s in last.cards.items()
                if name.startswith("worker-") == is_own
            }
            _put_busiest(found, kind, shares)
        return found


def _endless(job: JobFile) -> JobFile:
    """Without an end, and with nothing in it that takes gradients. No server dies, so none keeps
    its state for another one: that takes no virtual time, but at every join and commit some real
    one, for each worker.
    """
    return replace(
        job,
        job=replace(job.job, stop=Stop(seconds=SECONDS_MAX)),
        servers=replace(job.servers, durability="none"),
    )


def _stand_in(job: JobFile, parameters: int) -> tuple[JobFile, int]:
    """The job for a stand-in of the model, and the elements of that for each server. What is enough
    to be compressed of the model is so of the stand-in.
    """
    compression = job.compression
    kind = registry.load("compressors", compression.name)
    if not kind.selects:
        return job, STAND_IN
    least = getattr(kind.Options(**compression.options), "dense_below", None)
    if least is not None and parameters >= least * max(1, job.servers.count):
        options = {**compression.options, "dense_below": 0}
        job = replace(job, compression=replace(compression, options=options))
    return job, TO_CHOOSE_FROM


def _put_busiest(found: dict[str, Json], kind: str, shares: Mapping[str, float]) -> None:
    if shares:
        name = max(shares, key=lambda each: shares[each])
        found[kind] = {"name": name, "share": shares[name]}


def _rate(first: _Look, second: _Look) -> float:
    took_s = second.now - first.now
    return (second.steps - first.steps) / took_s if took_s > 0 else 0.0


def _halves(looks: Sequence[_Look]) -> list[float | None]:
    """Steps per second in each half of the time that was simulated; None: there is no such half."""
    first, last = looks[0], looks[-1]
    middle_s = (first.now + last.now) / 2
    middle = min(reversed(looks), key=lambda look: abs(look.now - middle_s))
    parts = ((first, middle), (middle, last))
    return [_rate(one, two) if two.now > one.now else None for one, two in parts]
