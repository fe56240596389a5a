"""How long a worker's work takes in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from daemons.worker.work_clock import KINDS
from dlctl.records.work_times import SUM, WorkTimes, upper_s
from dlctl.roles.protocol.effects import Compute
from dlctl.sim.request import SimulationRequest
from dlctl.wire.machine import Effect
from dlctl.wire.messages import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lognormal durations: their median in seconds, and the standard deviation of the logarithm."""

    median_s: float
    sigma: float = 0.0
    core_share: float = 1.0
    """The part for which a core is needed."""

    def draw(self, rng: np.random.Generator) -> float:
        return self.median_s * float(np.exp(self.sigma * rng.standard_normal()))


LEAST = 0.1
"""Quantile of what counts as short: a sum for which one did not have to wait for other members."""


class Recorded:
    """Durations with the distribution of a real run's, as if each had had its core."""

    def __init__(self, times: WorkTimes) -> None:
        self.core_share = times.core_share
        counts = np.array(times.histogram, float)
        self._shares = np.cumsum(counts) / counts.sum()
        # Where in a bucket they are is not known: the mean corrects what that leaves open.
        middles = np.array([upper_s(bucket - 0.5) for bucket in range(len(counts))])
        self._factor = times.alone_s / float((middles * counts).sum() / counts.sum())

        self.least_sleeps_s = max(0.0, times.quantile(LEAST) - self.core_share * times.alone_s)
        """Of the shortest ones, what they waited for other than a core."""

    def draw(self, rng: np.random.Generator) -> float:
        bucket = int(np.searchsorted(self._shares, rng.random(), side="right"))
        return self._factor * upper_s(bucket - 1 + float(rng.random()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    step: Lognormal
    evaluation: Lognormal
    build: Lognormal = Lognormal(median_s=1.0)
    sum_cpu_s: float = 3e-4
    """CPU time that a sum of a group takes each member, beside the transfer."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Slot -> factor by which its work is slower."""
    recorded: Mapping[int | None, Mapping[str, Recorded]] = field(default_factory=dict)
    """Slot, None for the others -> kind -> what it took in a real run, in place of the above."""

    @classmethod
    def of_request(cls, request: SimulationRequest) -> Durations:
        """request: `step_s` is known."""
        assert request.step_s is not None
        slow = {_slot(name): factor for name, factor in request.slow.items()}
        return cls(
            step=Lognormal(
                median_s=request.step_s, sigma=request.spread, core_share=request.core_share
            ),
            evaluation=Lognormal(median_s=request.evaluation_s, sigma=request.spread),
            build=Lognormal(median_s=request.build_s),
            slow={slot: factor for slot, factor in slow.items() if slot is not None},
            recorded={_slot(name): _recorded(kinds) for name, kinds in request.times.items()},
        )

    def of(self, slot: int, kind: str) -> Lognormal | Recorded | None:
        """None: it is short beside a step."""
        for whose in (slot, None):
            if (found := self.recorded.get(whose, {}).get(kind)) is not None:
                return found
        known = {"evaluation": self.evaluation, "build": self.build}
        return known.get(kind) or (self.step if kind in AS_A_STEP else None)


AS_A_STEP = ("step", "engine")
"""An operation of a method's engine takes as long as a step, if it was not recorded."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Of a piece of work that has a core whenever it needs one."""

    cpu_s: float
    sleeps_s: float

    @property
    def seconds(self) -> float:
        return self.cpu_s + self.sleeps_s


class Costs:
    """Draws durations. Each slot and kind of work has a generator of its own, so that two methods
    with one seed have the same slow steps.
    """

    def __init__(self, durations: Durations, seed: int) -> None:
        self.durations = durations
        self._seed = seed
        self._rngs: dict[tuple[int, str], np.random.Generator] = {}

    def of(self, slot: int, effect: Effect) -> Duration:
        """How long this effect takes; nothing if it is short beside a step."""
        kind = KINDS.get(type(effect))
        spread = None if kind is None else self.durations.of(slot, kind)
        if kind is None or spread is None:
            return Duration(0.0, 0.0)
        rng = self._rng(slot, kind)
        count = effect.count if isinstance(effect, Compute) else 1
        drawn = sum(spread.draw(rng) for _ in range(count)) * self.durations.slow.get(slot, 1.0)
        return Duration(drawn * spread.core_share, drawn * (1 - spread.core_share))

    def of_sum(self, slot: int) -> float:
        """CPU seconds of a member's part of a sum."""
        found = self.durations.of(slot, SUM)
        return (
            self.durations.sum_cpu_s
            if found is None
            else found.core_share * found.draw(self._rng(slot, SUM))
        )

    def of_ring(self, slot: int) -> float:
        """Seconds of a sum without a core, where nobody waits for another member."""
        found = self.durations.of(slot, SUM)
        return found.least_sleeps_s if isinstance(found, Recorded) else 0.0

    def _rng(self, slot: int, kind: str) -> np.random.Generator:
        if (slot, kind) not in self._rngs:
            number = [*KINDS.values(), SUM].index(kind)
            self._rngs[slot, kind] = np.random.default_rng([self._seed, slot, number])
        return self._rngs[slot, kind]


def _slot(name: str) -> int | None:
    """None: "*", all others."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else None


def _recorded(kinds: Mapping[str, Json]) -> dict[str, Recorded]:
    times = {kind: WorkTimes.of_json(row) for kind, row in kinds.items()}
    return {kind: Recorded(row) for kind, row in times.items() if row.count}
