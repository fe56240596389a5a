"""`checkpoints.best`: a metric of the task's `evaluate` and its direction, as in "val_loss min";
and which checkpoint of a run has the best value.

A checkpoint has the metrics of the newest evaluation before it; of several with the same
evaluation, the first was saved soonest after it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dlctl.records.manifest import FAILURE, Manifest
from dlctl.util import values
from dlctl.util.did_you_mean import meant

T = TypeVar("T")
_GRAMMAR = re.compile(r"\s*(\S|\S.*\S)\s+(min|max)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Best:
    metric: str
    end: str
    """min or max."""

    @staticmethod
    def parse(text: str) -> Best | None:
        """None for "". Raises ValueError."""
        if not text:
            return None
        match = _GRAMMAR.fullmatch(text)
        if match is None:
            raise ValueError('must be a metric, and min or max, as in "val_loss min"')
        return Best(match[1], match[2])

    def value(self, evaluation: Any) -> float | None:
        """The metric's value in an evaluation; None if it has no such finite number."""
        return values.number(evaluation.get(self.metric)) if evaluation else None

    def is_better(self, value: float, other: float | None) -> bool:
        if other is None:
            return True
        return value < other if self.end == "min" else value > other

    def of(self, checkpoints: Iterable[tuple[T, Manifest]]) -> T | None:
        """The best of these checkpoints, given oldest first; None if none of them has an evaluation
        with this metric. Checkpoints saved because the run had failed are skipped: their quality is
        unknown.
        """
        known = [
            (value, checkpoint)
            for checkpoint, manifest in checkpoints
            if FAILURE not in manifest and (value := self.value(manifest["evaluation"])) is not None
        ]
        first = min if self.end == "min" else max
        return first(known, key=operator.itemgetter(0))[1] if known else None

    def __str__(self) -> str:
        return f"{self.metric} {self.end}"


_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_TARGET = re.compile(
    r"\s*([^\s<>=](?:[^<>=]*[^\s<>=])?)\s*(>=|<=|>|<)"
    r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*",
    re.ASCII | re.IGNORECASE,
)
NAMES_MAX = 8
"""Metrics listed in an error."""


@dataclass(frozen=True, slots=True)
class Target:
    """`stop.target`: a metric of the task's `evaluate`, and a bound that ends the run when it is
    reached, as in "accuracy >= 0.85".
    """

    metric: str
    comparison: str
    bound: float

    @staticmethod
    def parse(text: str) -> Target:
        """Parse a target of the job file. Raises ValueError."""
        match = _TARGET.fullmatch(text)
        if match is None or not math.isfinite(float(match[3])):
            raise ValueError(
                'must be a metric, one of >= <= > <, and a number, as in "accuracy >= 0.85"'
            )
        return Target(match[1], match[2], float(match[3]))

    def is_reached(self, metrics: Mapping[str, float]) -> bool:
        value = metrics.get(self.metric)
        return value is not None and _COMPARE[self.comparison](value, self.bound)

    def missing_in(self, names: Collection[str]) -> str:
        """Why it cannot be reached if an evaluation has these metrics; "" if it can."""
        if self.metric in names:
            return ""
        return f"the target {self} cannot be reached: {available_metrics(self.metric, names)}"

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.bound:g}"


def available_metrics(metric: str, names: Collection[str]) -> str:
    """The metrics that the task's evaluate returns, for an error about this missing one."""
    if not names:
        return "the task has no evaluate, or it returns no metrics"
    shown = sorted(f"{name:.80}" for name in names)
    shown[NAMES_MAX:] = ["..."] if len(shown) > NAMES_MAX else []
    return f"the task's evaluate returns {', '.join(shown)}{meant(metric, names)}"
