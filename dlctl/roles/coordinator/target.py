"""A stop condition on a metric of the task's `evaluate`: "accuracy >= 0.85"."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_GRAMMAR = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(>=|<=|>|<)\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*$")


@dataclass(frozen=True, slots=True)
class Target:
    metric: str
    comparison: str
    bound: float

    @staticmethod
    def parse(text: str) -> Target:
        """Raises ValueError."""
        match = _GRAMMAR.match(text)
        if match is None:
            raise ValueError(f'"{text}" is not a target: write it like "accuracy >= 0.85"')
        return Target(match[1], match[2], float(match[3]))

    def is_reached(self, metrics: dict[str, float]) -> bool:
        value = metrics.get(self.metric)
        return value is not None and _COMPARE[self.comparison](value, self.bound)

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.bound:g}"
