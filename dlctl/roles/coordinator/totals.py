"""What a run has cost so far, in all of its executions: counters that only grow.

Workers count what their process has done. Here it is added up over all processes that there have
been. The counts that have gone into the totals are those of the daemons' rows of the same snapshot,
so whoever takes this coordinator's place counts on from there, and counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlctl.messages import Json

COUNTERS = ("push_bytes", "fetch_bytes", "pushes", "staleness_sum")
COUNT_MAX = 2**63


class Totals:
    def __init__(self, before: Json, counted: Mapping[str, tuple[int, Json]]) -> None:
        """before: what the snapshot had that was written last. counted: worker -> incarnation and
        metrics of that snapshot.
        """
        self._counts = {name: _count(before, name) for name in COUNTERS}
        seconds = before.get("seconds")
        self._seconds = float(seconds) if isinstance(seconds, int | float) else 0.0
        self._counted = dict(counted)
        self._seen_at: float | None = None

    def count(self, worker: str, incarnation: int, metrics: Json) -> None:
        """A process of a worker has reported."""
        of, before = self._counted.get(worker, (0, {}))
        for name in COUNTERS:
            now, was = _count(metrics, name), _count(before, name) if of == incarnation else 0
            # It has begun to count anew, as after it has joined again.
            self._counts[name] += now - was if now >= was else now
        self._counted[worker] = (incarnation, metrics)

    def look(self, now: float, *, is_working: bool) -> Json:
        """{seconds: at work, push_bytes, fetch_bytes, pushes, staleness_sum: of these}."""
        if self._seen_at is not None:
            self._seconds += now - self._seen_at
        self._seen_at = now if is_working else None
        return {"seconds": round(self._seconds, 3), **self._counts}


def _count(metrics: Json, name: str) -> int:
    """0 for what no worker of ours would report."""
    value = metrics.get(name)
    return value if type(value) is int and 0 <= value < COUNT_MAX else 0
