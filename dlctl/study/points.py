"""The points of a sweep: each is tried with every seed, in a trial of its own, and counts as a
whole. Scores are smaller for better ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


def name(values: Mapping[str, Any]) -> str:
    """Equal for equal points alone: 1 is another value than 1.0, and than true."""
    return json.dumps(values, sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class TriedPoint:
    values: Json
    trials: tuple[Json, ...]
    """Rows of `sweep.db`, one for each seed."""

    @property
    def generation(self) -> int:
        return int(self.trials[0]["generation"])

    @property
    def has_failed(self) -> bool:
        return any(trial["state"] == "failed" for trial in self.trials)

    @property
    def is_done(self) -> bool:
        return all(trial["state"] == "done" for trial in self.trials)

    @property
    def pruned_at(self) -> int | None:
        """The look of the pruner at which it ended, from 0."""
        ends = {(trial["state"], trial["rung"]) for trial in self.trials}
        ((state, rung), *others) = ends
        return int(rung) if state == "pruned" and not others else None

    @property
    def mean(self) -> float | None:
        """Over the seeds, whatever their lengths; None if one has failed, or has no score yet."""
        scores = [trial["score"] for trial in self.trials]
        if self.has_failed or None in scores:
            return None
        return float(sum(scores) / len(scores))

    @property
    def score(self) -> float | None:
        """The mean, if it is final and of seeds that have all trained for the same length."""
        return self.mean if self.is_done or self.pruned_at is not None else None


def of(trials: Iterable[Json]) -> list[TriedPoint]:
    """In the order in which they were asked for."""
    found: dict[tuple[int, str], list[Json]] = {}
    for trial in trials:
        found.setdefault((trial["generation"], name(trial["point"])), []).append(trial)
    return [TriedPoint(each[0]["point"], tuple(each)) for each in found.values()]


def ranked(trials: Iterable[Json]) -> list[TriedPoint]:
    """The best one first: the shorter a point has trained, the less its score says."""
    return sorted(of(trials), key=_rank)


def best(trials: Iterable[Json]) -> TriedPoint | None:
    """Of those all of whose seeds are done."""
    first = next(iter(ranked(trials)), None)
    return first if first is not None and first.is_done else None


def _rank(point: TriedPoint) -> tuple[int, int, float, int]:
    score, number = point.score, point.trials[0]["number"]
    if score is None:
        return 2, 0, 0.0, number
    return (0, 0, score, number) if point.is_done else (1, -(point.pruned_at or 0), score, number)
