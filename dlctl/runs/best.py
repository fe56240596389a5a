"""`checkpoints.best`: a metric of the task's `evaluate`, and which end of it is good, as in
"val_loss min"; and which checkpoint of a run has the best one.

A checkpoint has the metrics of the newest evaluation before it, and of several that have the same
the first was saved soonest after it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dlctl.runs.manifest import FAILURE, Manifest

T = TypeVar("T")
_GRAMMAR = re.compile(r"\s*([^\s]+)\s+(min|max)\s*", re.ASCII)


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
        """Of an evaluation's metrics; None if they have no such number."""
        found = evaluation.get(self.metric) if isinstance(evaluation, Mapping) else None
        if not isinstance(found, int | float):
            return None
        return float(found) if abs(found) <= sys.float_info.max else None

    def is_better(self, value: float, other: float | None) -> bool:
        if other is None:
            return True
        return value < other if self.end == "min" else value > other

    def of(self, checkpoints: Iterable[tuple[T, Manifest]]) -> T | None:
        """The best one of these, which come oldest first; None if before none of them there was an
        evaluation with this metric. Of what was saved because its run had failed, nobody knows how
        good it is.
        """
        best, best_value = None, None
        for checkpoint, manifest in checkpoints:
            value = self.value(manifest["evaluation"])
            is_failed = FAILURE in manifest
            if value is not None and not is_failed and self.is_better(value, best_value):
                best, best_value = checkpoint, value
        return best

    def __str__(self) -> str:
        return f"{self.metric} {self.end}"
