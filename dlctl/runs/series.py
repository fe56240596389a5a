"""How long the time series of a run may get: a run of weeks has no more rows than one of hours.

Table `metric` of run.db has one series for each daemon, and these two of the run as a whole:

    run          once a second while it is at work, what has been done and what it has cost so far:
                 {seconds, samples, epoch, workers, push_bytes, fetch_bytes, pushes, staleness_sum,
                 loss, task: {name: mean}, rates: {lr, inner_lr}, noise_scale}
    evaluation   the metrics of each evaluation, at the step that it was made of

Costs are totals over all executions of the run (`roles/coordinator/status.py`), so a rate is the
difference of two rows, however many there were in between. A series that has `ROWS_MAX` rows is
thinned: every second one is removed, and from then on one is taken half as often. What is newest,
and may be in no row, stands among the run's keys.
"""

from __future__ import annotations

from collections.abc import Mapping

RUN, EVALUATION = "run", "evaluation"
"""Names of series, beside those of daemons, which all have a number behind."""
ROWS_MAX = 1000
"""Of one series; a row has some 300 to 1,500 bytes."""
EVERY_S = {RUN: 1.0, EVALUATION: 0.0}
DAEMON_EVERY_S = 10.0
"""Of a series that has not been thinned, between two rows."""
THINNED_EVERY_S_MIN = 1.0


class Series:
    """When a row of each series is due, and when a series has to be thinned."""

    def __init__(self, counts: Mapping[str, int], every_s: Mapping[str, float]) -> None:
        """counts: rows that there are. every_s: that of whoever wrote the last one."""
        self.every_s = dict(every_s)
        """Of those that have been thinned."""
        self._counts = dict(counts)
        self._due_at: dict[str, float] = {}

    def take(self, name: str, now: float) -> bool:
        """Whether a row of now is to be written; if so it counts as written."""
        if now < self._due_at.get(name, now):
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
