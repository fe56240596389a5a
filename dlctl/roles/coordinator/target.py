"""`stop.target`: a metric of the task's `evaluate`, and a bound that ends the run when it is
reached, as in "accuracy >= 0.85".
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from dlctl.config import Stop
from dlctl.util.did_you_mean import did_you_mean

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_GRAMMAR = re.compile(
    r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*",
    re.ASCII | re.IGNORECASE,
)
NAMES_MAX = 8
"""Metrics that are named in an error."""


@dataclass(frozen=True, slots=True)
class Target:
    metric: str
    comparison: str
    bound: float

    @staticmethod
    def parse(text: str) -> Target:
        """Raises ValueError."""
        match = _GRAMMAR.fullmatch(text)
        if match is None or not math.isfinite(float(match[3])):
            raise ValueError(
                'must be a metric, one of >= <= > <, and a number, as in "accuracy >= 0.85"'
            )
        return Target(match[1], match[2], float(match[3]))

    def is_reached(self, metrics: Mapping[str, float]) -> bool:
        value = metrics.get(self.metric)
        return value is not None and _COMPARE[self.comparison](value, self.bound)

    def missing_in(self, names: Collection[str]) -> str:
        """Why it cannot be reached when an evaluation has these metrics; "" if it can."""
        if self.metric in names:
            return ""
        return f"the target {self} cannot be reached: {what_there_is(self.metric, names)}"

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.bound:g}"


def what_there_is(metric: str, names: Collection[str]) -> str:
    """What the task's evaluate returns, if it does not return this one."""
    if not names:
        return "the task has no evaluate, or it returns no metrics"
    shown = sorted(f"{name:.80}" for name in names)
    more = [f"{len(shown) - NAMES_MAX} more"] if len(shown) > NAMES_MAX else []
    text = f"the task's evaluate returns {', '.join(shown[:NAMES_MAX] + more)}"
    meant = did_you_mean(metric, names)
    return f"{text}; {meant}" if meant.startswith("did") else text


def is_only_stop(stop: Stop) -> bool:
    """Whether nothing but its target would ever end a run."""
    return not (stop.epochs or stop.steps or stop.samples or stop.seconds)
