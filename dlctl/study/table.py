"""The table of a comparison, from its record alone: the same record gives the same table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlctl.records.best import Target
from dlctl.study.judging import MEASURES, Middle, TargetCost, best_value, is_better, reached

Json = dict[str, Any]


def rows(record: Mapping[str, Any], by: str = "seconds") -> list[Json]:
    """A row for each method, the best first. by: the measure that decides.

    "verdict" compares a method with the one in the row above: "" for the first, else "slower" or
    "undecided"; "never" if no run has reached the target.
    """
    target = Target.parse(record["plan"]["target"])
    found = [_row(name, runs, target) for name, runs in record["runs"].items()]
    tuned = record["tuned"]
    costs = costs_of(record, by)
    more = target.comparison in (">=", ">")
    found.sort(key=lambda row: _order(row, by, is_more_better=more))
    for before, row in zip([None, *found], found, strict=False):
        row["tuned"] = tuned[row["method"]]
        row["verdict"] = _verdict(before, row, costs)
    return found


def costs_of(record: Mapping[str, Any], by: str = "seconds") -> dict[str, list[float | None]]:
    """Method -> the cost to the target with each seed; None: not reached."""
    target = Target.parse(record["plan"]["target"])
    return {name: _costs(runs, target, by) for name, runs in record["runs"].items()}


def is_slower(costs: Mapping[str, Sequence[float | None]], first: Json, second: Json) -> bool:
    """Whether the seeds say that the second row's method costs more."""
    return bool(is_better(costs[first["method"]], costs[second["method"]]))


def _row(name: str, runs: Sequence[Json | None], target: Target) -> Json:
    ran = [run for run in runs if run is not None and run["state"] != "failed"]
    at = [found for run in ran if (found := reached(run, target)) is not None]
    more = target.comparison in (">=", ">")
    best = [best_value(run, target.metric, is_more_better=more) for run in ran]
    middles = {measure: Middle.of([getattr(one, measure) for one in at]) for measure in MEASURES}
    return {
        "method": name,
        "seeds": len(runs),
        "reached": len(at),
        "failed": len(runs) - len(ran),
        **{measure: _as_data(middle) for measure, middle in middles.items()},
        "best": _as_data(Middle.of([value for value in best if value is not None])),
    }


def _as_data(middle: Middle | None) -> Json | None:
    return None if middle is None else {"median": middle.median, "range": [middle.low, middle.high]}


def _costs(runs: Sequence[Json | None], target: Target, measure: str) -> list[float | None]:
    at: list[TargetCost | None] = [None if run is None else reached(run, target) for run in runs]
    return [None if found is None else getattr(found, measure) for found in at]


def _order(row: Json, by: str, *, is_more_better: bool) -> tuple[float, float]:
    """Those that reach the target with more seeds come first, then by the median; of those that
    never do, the one that came closest.
    """
    if row[by] is not None:
        return -row["reached"], row[by]["median"]
    if row["best"] is None:
        return 1.0, 0.0
    best: float = row["best"]["median"]
    return 0.0, -best if is_more_better else best


def _verdict(before: Json | None, row: Json, costs: Mapping[str, Sequence[float | None]]) -> str:
    if not row["reached"]:
        return "never"
    if before is None:
        return ""
    return "slower" if is_slower(costs, before, row) else "undecided"
