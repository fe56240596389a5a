"""The figures of a simulated run, for its command and for comparisons."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from dlctl.records.series import EVALUATION, RUN
from dlctl.sim.simulation import Outcome
from dlctl.wire.messages import Json

CURVE_POINTS_MAX = 500


def summary_of(outcome: Outcome) -> Json:
    """Times are virtual seconds since the run's begin, and `ready_s` of them until it trained."""
    store = outcome.store
    run, totals = store.run, store.run.get("totals", {})
    rows = [row for row in store.metrics if row[1] == RUN]
    ready_s = rows[0][0] if rows else outcome.seconds
    pushes = int(totals.get("pushes", 0))
    return {
        "state": outcome.state or "stopped",
        "reason": outcome.reason if outcome.state else "the simulated time is over",
        "seconds": outcome.seconds,
        "ready_s": ready_s,
        "step": run.get("step", 0),
        "samples": run.get("samples", 0),
        "loss": run.get("loss"),
        "evaluation": run.get("evaluation"),
        "push_bytes": totals.get("push_bytes", 0),
        "fetch_bytes": totals.get("fetch_bytes", 0),
        "pushes": pushes,
        "staleness_mean": totals.get("staleness_sum", 0) / pushes if pushes else None,
        "restarts": sum(max(0, row["incarnation"] - 1) for row in store.daemons.values()),
        "evaluations": _evaluations(outcome, rows),
        "curve": _curve(rows),
    }


def _curve(rows: list[Any]) -> list[Json]:
    """The loss over time, bytes and samples."""
    every = max(1, len(rows) // CURVE_POINTS_MAX)
    kept = [*rows[::every], *rows[-1:]]
    return [_point(row) for row in kept if row[3].get("loss") is not None]


def _point(row: Any) -> Json:
    seconds, _, _, values = row
    return {
        "seconds": seconds,
        "samples": values["samples"],
        "bytes": values["push_bytes"] + values["fetch_bytes"],
        "loss": values.get("loss"),
    }


def _evaluations(outcome: Outcome, rows: list[Any]) -> list[Json]:
    """Every evaluation, at the time, samples and bytes of the run then."""
    times = [row[0] for row in rows]
    found = []
    for seconds, daemon, step, values in outcome.store.metrics:
        if daemon == EVALUATION:
            at = bisect_right(times, seconds) - 1
            here = _point(rows[at]) if at >= 0 else {"samples": 0, "bytes": 0}
            found.append(
                {**here, "seconds": seconds, "step": step, "metrics": dict(values["metrics"])}
            )
            found[-1].pop("loss", None)
    return found
