"""The result of an evaluation, as it is recorded.

A task may give its metrics any names, those of our own keys included. So a table with names of a
task, or with figures of a method, has nothing else in it; what dlctl says about it is beside it:

    keys of a run, and of a manifest   "evaluation": the metrics, "evaluation_step": the step
    a row of its series, an event      {"step", "metrics": {...}, "method": {...}}

dlctl 0.1.0 put the step, and a method's figures, among the metrics. Such records are still read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

METRICS, STEP = "evaluation", "evaluation_step"
"""Keys of a run and of a manifest."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    step: int
    """The step of the evaluated model."""
    metrics: Mapping[str, float]
    """What the task's `evaluate` returned."""
    method: Mapping[str, float] = field(default_factory=dict)
    """Figures of the method about the evaluated model."""

    def to_json(self) -> Json:
        return {"step": self.step, "metrics": dict(self.metrics), "method": dict(self.method)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Result:
        """Read a result, also from the old form: the metrics, with the step among them."""
        if isinstance(value.get("metrics"), Mapping):
            return Result(value["step"], value["metrics"], value.get("method") or {})
        return Result(value.get("step", 0), {k: v for k, v in value.items() if k != "step"})

    @staticmethod
    def of_keys(row: Mapping[str, Any]) -> Result | None:
        """The result in the keys of a run or of a manifest; None if nothing was evaluated."""
        row = in_new_form(row)
        found = row.get(METRICS)
        return Result(row[STEP] or 0, found) if isinstance(found, Mapping) else None


def keys(result: Result | None) -> Json:
    """The keys of a run or of a manifest."""
    if result is None:
        return {METRICS: None, STEP: None}
    return {METRICS: dict(result.metrics), STEP: result.step}


def in_new_form(row: Mapping[str, Any]) -> Json:
    """The keys of a run or of a manifest, of which those of an evaluation may have the old form."""
    found = row.get(METRICS)
    if STEP in row or not isinstance(found, Mapping):
        return dict(row)
    metrics, step = dict(found), found.get("step")
    metrics.pop("step", None)
    return {**row, METRICS: metrics, STEP: step if type(step) is int else None}
