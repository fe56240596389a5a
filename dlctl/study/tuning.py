"""Tuning with a fixed budget of trials: a pattern search (Hooke and Jeeves, 1961) on a logarithmic
grid.

It begins at the method's own values, and tries the neighbours of the best point so far. So a best
value at an edge of what was tried is always followed by one beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dlctl.job.config import JobFile
from dlctl.registry import load
from dlctl.study.judging import Score

RATE_FACTOR = 10**0.5
INTERVAL_FACTOR = 3.0
INTERVALS = ("local_steps", "exchange_every_steps", "push_every_steps", "round_steps")
EXCHANGES_MIN = 20
"""A run with fewer exchanges says little about a method."""
INTERVAL_MAX = 1 << 32
Point = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TunedKey:
    """A key of the job file, its value in the middle of the grid, and the step of the grid."""

    name: str
    middle: float
    factor: float
    is_whole: bool = False
    low: int = 1
    high: int = INTERVAL_MAX
    """Bounds of a whole number."""

    def value(self, place: int) -> float | int:
        value = self.middle * self.factor**place
        if not self.is_whole:
            return float(f"{value:.3g}")
        return round(min(max(value, self.low), self.high))


def keys_of(job: JobFile, steps: float | None) -> tuple[TunedKey, ...]:
    """What is tuned: the rates of the replicas' and of the servers' optimisers, and the interval of
    the exchanges; as far as the method lets them vary. steps: of each worker in the whole run, if
    they are known.
    """
    method = load("algorithms", job.algorithm.name)
    found = []
    if job.inner.name != "none" and "lr" in job.inner.options:
        found.append(TunedKey("inner.lr", job.inner.options["lr"], RATE_FACTOR))
    takes_rate = method.shard is not None and job.servers.count
    if takes_rate and (rate := job.optimizer.options.get("lr")):
        found.append(TunedKey("optimizer.lr", rate, RATE_FACTOR))
    found = [key for key in found if any(_accepts(job, key.name, key.value(p)) for p in (1, -1))]
    for name in INTERVALS:
        value = job.algorithm.options.get(name)
        if isinstance(value, int) and value > 1:
            found.append(_interval(job, f"algorithm.{name}", value, steps))
            break
    return tuple(found)


def _interval(job: JobFile, name: str, value: int, steps: float | None) -> TunedKey:
    accepts = partial(_accepts, job, name)
    low, high = _last_accepted(accepts, value, 1), _last_accepted(accepts, value, INTERVAL_MAX)
    most = math.inf if steps is None else max(1.0, steps / EXCHANGES_MIN)
    middle = min(float(value), max(most, low))
    return TunedKey(name, middle, INTERVAL_FACTOR, is_whole=True, low=low, high=high)


def _accepts(job: JobFile, name: str, value: float) -> bool:
    """Whether the method has nothing against this value of a key of one of its sections."""
    section, _, key = name.partition(".")
    choice = getattr(job, section)
    choice = replace(choice, options={**choice.options, key: value})
    changed: Any = {section: choice}
    return not load("algorithms", job.algorithm.name).check(replace(job, **changed))


def _last_accepted(accepts: Callable[[int], bool], inside: int, outside: int) -> int:
    """The last value that is accepted on the way from one that is, as the job's own."""
    if accepts(outside):
        return outside
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        if accepts(middle):
            inside = middle
        else:
            outside = middle
    return inside


@dataclass(slots=True)
class PatternSearch:
    """`ask` for a generation, `tell` its scores; the same answers give the same questions."""

    keys: Sequence[TunedKey]
    trials: int
    generation: int = 4
    """Trials that are asked for at once, however many run at the same time."""
    scores: dict[Point, Score] = field(default_factory=dict)

    def ask(self) -> list[Point]:
        """Points to try; [] when the budget is spent or nothing is left to try."""
        left = self.trials - len(self.scores)
        return list(self._next())[: max(0, min(self.generation, left))]

    def tell(self, scores: Mapping[Point, Score]) -> None:
        self.scores.update(scores)

    @property
    def best(self) -> Point:
        return min(self.scores, key=lambda point: (self.scores[point], point))

    def values(self, point: Point) -> dict[str, Any]:
        """Key of the job file -> value."""
        return {key.name: key.value(place) for key, place in zip(self.keys, point, strict=True)}

    def _next(self) -> Iterator[Point]:
        """Points whose values nobody has tried: whole numbers are the same at several places."""
        tried = {tuple(self.values(point).values()) for point in self.scores}
        for point in self._near():
            values = tuple(self.values(point).values())
            if values not in tried:
                tried.add(values)
                yield point

    def _near(self) -> Iterator[Point]:
        middle: Point = (0,) * len(self.keys)
        best = self.best if self.scores else middle
        yield best
        for distance in (1, 2):
            for index in range(len(self.keys)):
                for step in (distance, -distance):
                    yield (*best[:index], best[index] + step, *best[index + 1 :])
