"""The names under which the run's series go to other systems: TensorBoard, wandb, MLflow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from dlctl.observe.history import Point, RunHistory, point_of
from dlctl.records.evaluated import Result
from dlctl.records.series import EVALUATION, RUN
from dlctl.wire.messages import Json

RECENT = 32
"""Rows that rates are measured over."""
LINES = {
    "loss": "train/loss",
    "lr": "rate/lr",
    "inner_lr": "rate/inner_lr",
    "samples_per_s": "run/samples_per_s",
    "staleness": "run/staleness",
    "push_bytes_per_s": "run/push_bytes_per_s",
    "fetch_bytes_per_s": "run/fetch_bytes_per_s",
    "workers": "run/workers",
    "noise_scale": "run/noise_scale",
}
"""Line of a history -> its tag."""
TASK, EVALUATED, METHOD = "task/", "eval/", "method/"
"""Tags of the task's further metrics of its loss, of those of its evaluate, and of the method's
figures about the evaluated model: names that others have chosen, and no tag of ours begins so."""


class TaggedRows:
    """Turns the rows of series, in their order, into values by tag."""

    def __init__(self) -> None:
        self._recent: deque[Point] = deque(maxlen=RECENT)

    def values(self, at: float, name: str, step: int, row: Json) -> dict[str, float]:
        """Tag -> value; {} for a row of a series that has no tags, such as that of a daemon.

        at: seconds since 1970. name: the series. Raises KeyError, TypeError or ValueError for rows
        that no coordinator writes.
        """
        found: dict[str, float | None] = {}
        if name == EVALUATION:
            result = Result.from_json(row)
            found = _under(EVALUATED, result.metrics) | _under(METHOD, result.method)
        elif name == RUN:
            self._recent.append(point_of({**row, "at": at, "step": step}))
            recent = RunHistory(run_id="", job={}, job_text="", run={}, points=list(self._recent))
            newest = {LINES[line]: values[-1] for line, values in recent.lines().items()}
            found = newest | _under(TASK, self._recent[-1].task)
        return {tag: value for tag, value in found.items() if value is not None}


def _under(prefix: str, table: Mapping[str, float]) -> dict[str, float | None]:
    return {prefix + name: value for name, value in table.items()}
