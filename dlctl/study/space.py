"""What a sweep varies: "inner.lr=1e-4..1e-2:log", "algorithm.local_steps=10,50", "seed=0..9"."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlctl.errors import UsageError

HINT = "--set inner.lr=1e-4..1e-2:log, or --set algorithm.local_steps=10,50"


@dataclass(frozen=True, slots=True)
class Choices:
    """One of these values."""

    values: tuple[Any, ...]

    def draw(self, rng: np.random.Generator) -> Any:
        return self.values[int(rng.integers(len(self.values)))]


@dataclass(frozen=True, slots=True)
class ValueRange:
    """A number from `low` to `high`, both included; whole if both bounds are written so."""

    low: float
    high: float
    is_whole: bool
    is_log: bool

    def draw(self, rng: np.random.Generator) -> float | int:
        low, high = self.low, self.high + (1 if self.is_whole else 0)
        if self.is_log:
            value = math.exp(rng.uniform(math.log(low), math.log(high)))
        else:
            value = rng.uniform(low, high)
        return min(int(value), int(self.high)) if self.is_whole else float(value)


Axis = Choices | ValueRange


def parse(words: Sequence[str]) -> dict[str, Axis]:
    """Key of the job file -> what it may be. Raises UsageError."""
    found: dict[str, Axis] = {}
    for text in words:
        key, is_one, spec = text.partition("=")
        if not is_one or not key.strip() or not spec.strip():
            raise UsageError(f'--set: "{text}" is no KEY=VALUES', hint=HINT)
        if key.strip() in found:
            raise UsageError(f"--set: {key.strip()} is given twice")
        found[key.strip()] = _axis(spec.strip(), text)
    return found


def _axis(spec: str, text: str) -> Axis:
    low, is_range, rest = spec.partition("..")
    if not is_range:
        words = [_value(word.strip()) for word in spec.split(",")]
        return Choices(tuple({repr(word): word for word in words}.values()))
    high, _, scale = rest.partition(":")
    bounds = [_value(low.strip()), _value(high.strip())]
    is_number = all(isinstance(b, int | float) and not isinstance(b, bool) for b in bounds)
    if not is_number or scale not in ("", "log") or not bounds[0] < bounds[1]:
        raise UsageError(f'--set: "{text}" is no range of numbers', hint=HINT)
    if scale == "log" and bounds[0] <= 0:
        raise UsageError(f'--set: "{text}": a logarithmic range begins above zero', hint=HINT)
    is_whole = all(isinstance(bound, int) for bound in bounds)
    return ValueRange(float(bounds[0]), float(bounds[1]), is_whole, scale == "log")


def _value(word: str) -> Any:
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word


def grid(space: Mapping[str, Axis]) -> list[dict[str, Any]] | None:
    """All points of a space of choices, the last key varies fastest; None: it has intervals."""
    if not all(isinstance(axis, Choices) for axis in space.values()):
        return None
    return list(every(space))


def count(space: Mapping[str, Axis]) -> float:
    """How many points there are; infinite with a range of fractions."""
    return math.prod(_count(axis) for axis in space.values())


def _count(axis: Axis) -> float:
    if isinstance(axis, Choices):
        return len(axis.values)
    return axis.high - axis.low + 1 if axis.is_whole else math.inf


def every(space: Mapping[str, Axis]) -> Iterator[dict[str, Any]]:
    """All points of a finite space, the last key varies fastest."""
    values = [
        axis.values if isinstance(axis, Choices) else range(int(axis.low), int(axis.high) + 1)
        for axis in space.values()
    ]
    for point in itertools.product(*values):
        yield dict(zip(space, point, strict=True))
