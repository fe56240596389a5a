"""How long a worker's work takes in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dlctl.records.work_times import BUCKET_S, WorkTimes
from dlctl.roles.protocol.effects import (
    BuildModel,
    Compute,
    RunEngine,
    RunEvaluation,
)
from dlctl.wire.machine import Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lognormal durations: their median in seconds, and the standard deviation of the logarithm."""

    median_s: float
    sigma: float = 0.0

    def draw(self, rng: np.random.Generator) -> float:
        return self.median_s * float(np.exp(self.sigma * rng.standard_normal()))


class Recorded:
    """Durations with the distribution of a real run's."""

    def __init__(self, times: WorkTimes) -> None:
        counts = np.array(times.histogram, float)
        self._shares = np.cumsum(counts) / counts.sum()
        # A bucket is a power of two wide: the mean corrects what that leaves open.
        middles = BUCKET_S * 2.0 ** (np.arange(len(counts)) - 0.5)
        self._factor = times.mean_s / float((middles * counts).sum() / counts.sum())

    def draw(self, rng: np.random.Generator) -> float:
        bucket = int(np.searchsorted(self._shares, rng.random(), side="right"))
        return float(self._factor * BUCKET_S * 2.0 ** (bucket - 1 + rng.random()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    step: Lognormal
    evaluation: Lognormal
    build: Lognormal = Lognormal(median_s=1.0)
    engine: Lognormal | None = None
    """None: an operation of the method's engine takes as long as a step."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Slot -> factor by which its work is slower."""
    recorded: Mapping[int | None, Mapping[str, Recorded]] = field(default_factory=dict)
    """Slot, None for the others -> kind -> what it took in a real run, in place of the above."""

    def of(self, slot: int, kind: str) -> Lognormal | Recorded:
        for whose in (slot, None):
            if (found := self.recorded.get(whose, {}).get(kind)) is not None:
                return found
        spread: Lognormal | None = getattr(self, kind)
        return spread or self.step


KINDS: dict[type[Effect], str] = {
    Compute: "step", RunEvaluation: "evaluation", BuildModel: "build", RunEngine: "engine",
}  # fmt: skip


class Costs:
    """Draws durations. Each slot and kind of work has a generator of its own, so that two methods
    with one seed have the same slow steps.
    """

    def __init__(self, durations: Durations, seed: int) -> None:
        self.durations = durations
        self._seed = seed
        self._rngs: dict[tuple[int, str], np.random.Generator] = {}

    def of(self, slot: int, effect: Effect) -> float:
        """Seconds of this effect; 0 for what is short beside a step."""
        kind = KINDS.get(type(effect))
        if kind is None:
            return 0.0
        spread = self.durations.of(slot, kind)
        rng = self._rng(slot, kind)
        count = effect.count if isinstance(effect, Compute) else 1
        drawn = sum(spread.draw(rng) for _ in range(count))
        return drawn * self.durations.slow.get(slot, 1.0)

    def _rng(self, slot: int, kind: str) -> np.random.Generator:
        if (slot, kind) not in self._rngs:
            number = list(KINDS.values()).index(kind)
            self._rngs[slot, kind] = np.random.default_rng([self._seed, slot, number])
        return self._rngs[slot, kind]
