"""The figures of an ended run, real or simulated, from its directory: costs and evaluations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dlctl.records.series import EVALUATION, RUN
from dlctl.runs.database import RunDb

Json = dict[str, Any]
CURVE_POINTS_MAX = 300


def of_run(directory: Path) -> Json:
    """Seconds are those since the run trained first; its start took `start_s` before that.

    Raises DlctlError if the database cannot be read.
    """
    with closing(RunDb(directory, readonly=True)) as db:
        run, daemons = db.run(), db.daemons()
        rows, evaluations = [*db.metrics(RUN)], [*db.metrics(EVALUATION)]
    # A coordinator that was killed has recorded no end.
    ended_at = run.get("ended_at") or run.get("updated_at") or 0.0
    begun_at = run.get("started_at") or 0.0
    ready_at = run.get("ready_at") or ended_at
    totals = run.get("totals") or {}
    pushes = totals.get("pushes", 0)
    return {
        "state": run.get("state"),
        "reason": run.get("reason"),
        "start_s": ready_at - begun_at,
        "seconds": ended_at - ready_at,
        "step": run.get("step") or 0,
        "samples": run.get("samples") or 0,
        "loss": run.get("loss"),
        "evaluation": run.get("evaluation"),
        "push_bytes": totals.get("push_bytes", 0),
        "fetch_bytes": totals.get("fetch_bytes", 0),
        "pushes": pushes,
        "staleness_mean": totals.get("staleness_sum", 0) / pushes if pushes else None,
        "restarts": sum(max(0, row["incarnation"] - 1) for row in daemons),
        "evaluations": [_evaluated(row, rows, ready_at) for row in evaluations],
        "curve": [_point(row, ready_at) for row in _thinned(rows) if row["loss"] is not None],
    }


def _evaluated(row: Mapping[str, Any], rows: Sequence[Json], ready_at: float) -> Json:
    """An evaluation, with the samples and bytes of the run at that time, between two rows."""
    times = [each["at"] for each in rows]
    after = bisect_right(times, row["at"])
    here = {"samples": 0.0, "bytes": 0.0}
    if after:
        before, next_one = rows[after - 1], rows[min(after, len(rows) - 1)]
        width = next_one["at"] - before["at"]
        share = (row["at"] - before["at"]) / width if width else 0.0
        for key in here:
            low, high = _costs(before)[key], _costs(next_one)[key]
            here[key] = low + share * (high - low)
    return {"seconds": row["at"] - ready_at, "step": row["step"], **here, "metrics": row["metrics"]}


def _costs(row: Mapping[str, Any]) -> dict[str, float]:
    return {"samples": row["samples"], "bytes": row["push_bytes"] + row["fetch_bytes"]}


def _point(row: Mapping[str, Any], ready_at: float) -> Json:
    return {"seconds": row["at"] - ready_at, **_costs(row), "loss": row["loss"]}


def _thinned(rows: Sequence[Json]) -> list[Json]:
    every = max(1, len(rows) // CURVE_POINTS_MAX)
    return [*rows[::every], *rows[-1:]]
