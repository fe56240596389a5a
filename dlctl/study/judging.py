"""What a run has reached, and which of two methods was better over several seeds.

The target is reached at the first evaluation that meets it, not at the last one: a run that passes
the target and goes on has reached it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlctl.records.best import Target

Json = dict[str, Any]
MEASURES = ("seconds", "bytes", "samples")
SHARE = 0.8
"""Of the seeds in which a difference must have the same sign."""
Score = tuple[int, float]
"""Smaller is better: (0, seconds to the target), or (1, how bad the best value was)."""
FAILED: Score = (2, 0.0)


@dataclass(frozen=True, slots=True)
class TargetCost:
    """The cost of the first evaluation that met the target."""

    seconds: float
    bytes: float
    samples: float


def reached(outcome: Mapping[str, Any], target: Target) -> TargetCost | None:
    """None: the run has never met the target."""
    for row in outcome["evaluations"]:
        if target.is_reached(row["metrics"]):
            return TargetCost(row["seconds"], row["bytes"], row["samples"])
    return None


def best_value(outcome: Mapping[str, Any], metric: str, *, is_more_better: bool) -> float | None:
    """The best value of a metric in any evaluation of a run."""
    found = [row["metrics"].get(metric) for row in outcome["evaluations"]]
    finite = [value for value in found if value is not None and math.isfinite(value)]
    return (max if is_more_better else min)(finite, default=None)


def score(outcome: Mapping[str, Any] | None, target: Target) -> Score:
    """How good a trial was. None: it has failed."""
    if outcome is None or outcome["state"] == "failed":
        return FAILED
    if (at := reached(outcome, target)) is not None:
        return 0, at.seconds
    more = target.comparison in (">=", ">")
    value = best_value(outcome, target.metric, is_more_better=more)
    return FAILED if value is None else (1, -value if more else value)


@dataclass(frozen=True, slots=True)
class Middle:
    """Median and quartiles over the seeds that reached the target."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Middle | None:
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)


def is_better(first: Sequence[float | None], second: Sequence[float | None]) -> bool | None:
    """Whether the first of two methods was faster; None: undecided. Values are of paired seeds;
    None: the target was not reached, which is slower than any time.

    It is if at least `SHARE` of the seeds say so, and the median difference is larger than half of
    the range between the quartiles of the differences. Differences are those of the seeds with
    which both reached the target; where these are not the most, the median difference is beyond
    any spread.
    """
    pairs = [(_time(a), _time(b)) for a, b in zip(first, second, strict=True)]
    wins = sum(a < b for a, b in pairs)
    losses = sum(b < a for a, b in pairs)
    if max(wins, losses) < SHARE * len(pairs):
        return None
    differences = [b - a for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    middle = Middle.of(differences) if 2 * len(differences) > len(pairs) else None
    if middle is not None and abs(middle.median) <= (middle.high - middle.low) / 2:
        return None
    return wins > losses


def _time(value: float | None) -> float:
    return math.inf if value is None else value
