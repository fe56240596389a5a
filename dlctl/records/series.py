"""Bounds on a run's time series: a run of weeks has no more rows than one of hours.

Table `metric` of run.db has one series for each daemon, and these two of the run as a whole:

    run          once a second during training and once after it, progress and cost so far:
                 {seconds, samples, epoch, workers, push_bytes, fetch_bytes, pushes, staleness_sum,
                 loss, task: {name: mean}, rates: {lr, inner_lr}, noise_scale}
    evaluation   the result of each evaluation (`evaluated`), at the step of the evaluated model

Costs are totals over all executions of the run (`roles/coordinator/status.py`), so a rate is the
difference of two rows, however many there were in between. A series with `ROWS_MAX` rows is
thinned: every second one is removed, and from then on rows are taken half as often. The newest
values, which may be in no row, are among the run's keys.
"""

from __future__ import annotations

from collections.abc import Mapping

RUN, EVALUATION = "run", "evaluation"
"""Names of series, beside those of daemons, which all end in a number."""
ROWS_MAX = 1000
"""The rows of one series; a row has some 300 to 1,500 bytes."""
EVERY_S = {RUN: 1.0, EVALUATION: 0.0}
DAEMON_EVERY_S = 10.0
"""Interval between two rows of a series that has not been thinned."""
THINNED_EVERY_S_MIN = 1.0


class Series:
    """When a row of each series is due, and when a series has to be thinned."""

    def __init__(self, counts: Mapping[str, int], every_s: Mapping[str, float]) -> None:
        """counts: existing rows. every_s: that of the previous coordinator."""
        self.every_s = dict(every_s)
        """Name of a thinned series -> seconds between two of its rows."""
        self._counts = dict(counts)
        self._due_at: dict[str, float] = {}

    def take(self, name: str, now: float, *, always: bool = False) -> bool:
        """Whether a row is due now, or `always`; if so, it counts as written."""
        if not always and now < self._due_at.get(name, now):
            return False
        self._due_at[name] = now + self._every_s(name)
        self._counts[name] = self._counts.get(name, 0) + 1
        return True

    def thin(self, name: str) -> bool:
        """Whether this series is full: if so, it counts as thinned."""
        if self._counts[name] < ROWS_MAX:
            return False
        self._counts[name] -= self._counts[name] // 2
        self.every_s[name] = max(2 * self._every_s(name), THINNED_EVERY_S_MIN)
        return True

    def _every_s(self, name: str) -> float:
        return self.every_s.get(name, EVERY_S.get(name, DAEMON_EVERY_S))
