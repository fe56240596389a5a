"""The history of a run, as values.

A run records one `Point` a second, later fewer (`records/series.py`). They are in the order in
which they were written. Where the run went back to a checkpoint the steps begin again below those
before; against steps and samples only what counts in the end is drawn, against time and bytes all
of it.
"""

from __future__ import annotations

import math
import sqlite3
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, NotFound
from dlctl.records.evaluated import Result
from dlctl.records.series import EVALUATION, RUN
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import read_job
from dlctl.util import hints, regular

AXES = ("seconds", "steps", "samples", "epochs", "bytes")
"""The x axes of lines, besides the time of day. Seconds: running time of all executions."""
RATE_S = 5.0
PAUSE_S = 5.0
RATES = ("lr", "inner_lr")
AT_MAX = 1e11
"""An upper bound of times, in the year 5138."""
Line = list[float | None]
"""One value for each point; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The run at one moment; counts are of all workers, over all executions."""

    at: float
    """Seconds since 1970 (UTC)."""
    step: int
    samples: int
    seconds: float
    """Running time so far."""
    epoch: float = 0.0
    """Passes over the dataset."""
    workers: int = 0
    """Running workers."""
    push_bytes: int = 0
    fetch_bytes: int = 0
    pushes: int = 0
    """Acknowledged pushes."""
    staleness_sum: int = 0
    """The summed staleness of all pushes; that of one is the updates by others since its fetch."""
    loss: float | None = None
    """Running mean."""
    task: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the task's loss, as running means."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """"lr" of the servers, "inner_lr" of the replicas."""
    noise_scale: float | None = None
    """Samples."""

    def on(self, axis: str) -> float:
        """The position of the point on one of `AXES`."""
        return {
            "seconds": self.seconds, "steps": float(self.step), "samples": float(self.samples),
            "epochs": self.epoch, "bytes": float(self.push_bytes + self.fetch_bytes),
        }[axis]  # fmt: skip


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    at: float
    step: int
    metrics: Mapping[str, float]
    method: Mapping[str, float] = field(default_factory=dict)
    """Figures of the method about the evaluated model."""


@dataclass(frozen=True, slots=True)
class WorkerPoint:
    """One worker at one moment, from its own reports."""

    at: float
    samples_per_s: float | None


@dataclass(frozen=True, slots=True)
class RunEvent:
    at: float
    kind: str
    daemon: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    run_id: str
    job: Mapping[str, Any]
    """The resolved job; {} if it cannot be read."""
    job_text: str
    """The original job file; "" if it is gone."""
    run: Mapping[str, Any]
    """The run's keys, as `status` shows them."""
    points: Sequence[Point]
    """The points of the run in order; at least one."""
    evaluations: Sequence[EvaluationPoint] = ()
    workers: Mapping[str, Sequence[WorkerPoint]] = field(default_factory=dict)
    events: Sequence[RunEvent] = ()

    @property
    def method(self) -> str:
        algorithm = self.job.get("algorithm")
        name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
        return str(name or self.run.get("algorithm") or "?")

    # ------------------------------------------------------------ lines

    def lines(self) -> dict[str, Line]:
        """Name -> values, for all our own data of the points."""
        points = self.points
        seconds = [point.seconds for point in points]
        found: dict[str, Sequence[float | None]] = {
            **{name: [point.rates.get(name) for point in points] for name in RATES},
            "loss": [point.loss for point in points],
            "samples_per_s": rate([point.samples for point in points], seconds),
            "staleness": self._staleness(),
            "push_bytes_per_s": rate([point.push_bytes for point in points], seconds),
            "fetch_bytes_per_s": rate([point.fetch_bytes for point in points], seconds),
            "workers": [point.workers for point in points],
            "noise_scale": [point.noise_scale for point in points],
        }
        return {name: [*line] for name, line in found.items() if any(v is not None for v in line)}

    def task_lines(self) -> dict[str, Line]:
        """The lines of the further metrics of the task's loss, under its names."""
        return _lines([point.task for point in self.points])

    def evaluation_lines(self) -> dict[str, Line]:
        """Name of a metric of the task's `evaluate` -> its value in each evaluation."""
        return _lines([found.metrics for found in self.evaluations])

    def method_lines(self) -> dict[str, Line]:
        """The lines of the method's figures about the evaluated models."""
        return _lines([found.method for found in self.evaluations])

    def _staleness(self) -> Line:
        """Mean of the pushes since the point before; None where there were none."""
        line: Line = [None]
        for before, now in pairwise(self.points):
            pushes = now.pushes - before.pushes
            grown = now.staleness_sum - before.staleness_sum
            line.append(grown / pushes if pushes > 0 else None)
        return line

    def counting(self) -> list[bool]:
        """For each point, whether the run was not rolled back behind it later."""
        lowest = self._lowest_from()
        return [point.step <= low for point, low in zip(self.points, lowest, strict=False)]

    def counting_evaluations(self) -> list[bool]:
        """For each evaluation, whether the run was not rolled back behind it later."""
        lowest = self._lowest_from()
        return [e.step <= lowest[self._number_until(e.at)] for e in self.evaluations]

    def _lowest_from(self) -> list[float]:
        """The lowest step from each point on, and infinity after the last one."""
        steps = (float(point.step) for point in reversed(self.points))
        return [*accumulate(steps, min, initial=math.inf)][::-1]

    def _number_until(self, at: float) -> int:
        return bisect_right(self.points, at, key=lambda point: point.at)

    def pauses(self) -> list[tuple[float, float]]:
        """The intervals in which the run was not running, as between a stop and the next start."""
        return [
            (before.at, after.at)
            for before, after in pairwise(self.points)
            if after.at - before.at - (after.seconds - before.seconds) > PAUSE_S
        ]

    # ------------------------------------------------------------ places

    def point_at(self, at: float) -> Point:
        """The newest point at this time; the first point for earlier times."""
        return self.points[max(0, self._number_until(at) - 1)]

    def of_evaluation(self, evaluation: EvaluationPoint, axis: str) -> float:
        """The position of its step on an axis: between the two points around it. The evaluation
        itself was recorded later."""
        if axis == "steps":
            return float(evaluation.step)
        known = [p for p in self.points if p.at <= evaluation.at] or [self.points[0]]
        after = known[-1]
        for before in reversed(known):
            if before.step <= evaluation.step:
                break
            after = before
        else:
            return after.on(axis)
        width = after.step - before.step
        part = (evaluation.step - before.step) / width if width > 0 else 0.0
        return before.on(axis) + min(1.0, part) * (after.on(axis) - before.on(axis))


def _lines(tables: Sequence[Mapping[str, float]]) -> dict[str, Line]:
    names = sorted({name for table in tables for name in table})
    return {name: [table.get(name) for table in tables] for name in names}


def rate(counts: Sequence[int], seconds: Sequence[float]) -> Line:
    """Growth per second at each point, over about the last `RATE_S`. Work is counted by portions,
    in jumps that may be far apart: the rate is measured from jump to jump; None without jumps.
    """
    line: Line = [None] * len(counts)
    jumps: list[int] = []
    for i, count in enumerate(counts):
        if i and count == counts[i - 1]:
            continue
        if i and count < counts[i - 1]:
            jumps.clear()
        while len(jumps) > 1 and seconds[i] - seconds[jumps[1]] >= RATE_S:
            del jumps[0]
        if jumps and (elapsed_s := seconds[i] - seconds[jumps[0]]) > 0:
            line[i] = (count - counts[jumps[0]]) / elapsed_s
        jumps.append(i)
    return line


# ---------------------------------------------------------------- reading


def read(directory: Path, *, whole: bool = True) -> RunHistory:
    """The history of a run; not `whole`: without that of each worker, and without events. Raises
    DlctlError if a part of it is damaged, NotFound if there is none.
    """
    try:
        with closing(RunDb(directory, readonly=True)) as db:
            run = db.run()
            points = [point_of(row) for row in db.metrics(RUN)]
            evaluations = [_evaluation(row) for row in db.metrics(EVALUATION)]
            names = [name for name in db.metric_counts() if name.startswith("worker-")]
            workers = {
                name: [_worker(row) for row in db.metrics(name)]
                for name in sorted(names, key=lambda name: (len(name), name))
                if whole
            }
            found = db.events() if whole else ()
            events = [RunEvent(row["at"], row["kind"], row["daemon"], row["text"]) for row in found]
    except (sqlite3.Error, ValueError, TypeError, KeyError, OverflowError) as error:
        raise DlctlError(
            f"the history of {directory.name} is damaged: {error}",
            where=str(directory / "run.db"),
            hint=hints.command(
                f"dlctl checkpoint export -j {directory.name}", "writes the model that it has"
            ),
        ) from error
    if not points:
        raise NotFound(
            f"{directory.name} has no history: it has not trained yet, or an older dlctl made it",
            where=str(directory),
            hint=f"dlctl status -j {directory.name}",
        )
    points += _newest_point(run, points[-1])
    evaluations += _newest_evaluation(run, evaluations)
    return RunHistory(
        run_id=directory.name, job=read_job(directory), job_text=_job_text(directory), run=run,
        points=points, evaluations=evaluations, workers=workers, events=events,
    )  # fmt: skip


def point_of(row: Mapping[str, Any]) -> Point:
    """The point that a row of the database holds. Raises KeyError, TypeError or ValueError for rows
    that no coordinator writes.
    """
    numbers: dict[str, Any] = {name: _number(row[name]) for name in ("step", "samples", "seconds")}
    optional = ("epoch", "workers", "push_bytes", "fetch_bytes", "pushes", "staleness_sum")
    numbers |= {name: _number(row.get(name, 0)) for name in optional}
    maybe: dict[str, Any] = {name: _maybe(row.get(name)) for name in ("loss", "noise_scale")}
    tables: dict[str, Any] = {name: _numbers(row.get(name, {})) for name in ("task", "rates")}
    return Point(at=_time(row), **numbers, **maybe, **tables)


def _evaluation(row: Mapping[str, Any]) -> EvaluationPoint:
    found = Result.from_json({name: value for name, value in row.items() if name != "at"})
    metrics, method = _numbers(found.metrics), _numbers(found.method)
    return EvaluationPoint(_time(row), int(_number(found.step)), metrics, method)


def _worker(row: Mapping[str, Any]) -> WorkerPoint:
    """The values in a worker's own report may be of any type."""
    rate = row.get("samples_per_s")
    return WorkerPoint(_time(row), _maybe(rate) if type(rate) in (int, float) else None)


def _time(row: Mapping[str, Any]) -> float:
    at = float(_number(row["at"]))
    if not 0 <= at <= AT_MAX:
        raise ValueError(f"{at:g} is no time")
    return at


def _number(value: Any) -> Any:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"{value!r:.80} is no number")
    return value


def _maybe(value: Any) -> float | None:
    """None for values that are not finite, as the loss of a ruined model."""
    is_odd = value is None or (type(value) is float and not math.isfinite(value))
    return None if is_odd else float(_number(value))


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, dict):
        raise TypeError(f"{found!r:.80} is no table of numbers")
    numbers = {str(name): _maybe(value) for name, value in found.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def _newest_point(run: Mapping[str, Any], last: Point) -> list[Point]:
    """A point from the run's keys that is newer than its last row: mostly work during the drain."""
    totals, at = run.get("totals"), run.get("updated_at")
    if not isinstance(totals, Mapping) or not isinstance(at, int | float) or at <= last.at:
        return []
    row = {
        "at": at, "step": run.get("step", last.step), "samples": run.get("samples", last.samples),
        "epoch": run.get("data_epoch", last.epoch), "loss": run.get("loss"),
        "task": run.get("metrics") or {}, "rates": dict(last.rates), "workers": last.workers,
        **totals,
    }  # fmt: skip
    newest = point_of(row)
    return [newest] if newest.step != last.step else []


def _newest_evaluation(
    run: Mapping[str, Any], recorded: Sequence[EvaluationPoint]
) -> list[EvaluationPoint]:
    """The newest evaluation, if it has no row: with very many, not all are recorded."""
    found = Result.of_keys(run)
    if found is None or (recorded and recorded[-1].step == found.step):
        return []
    return [_evaluation({**found.to_json(), "at": run.get("updated_at", 0.0)})]


def _job_text(directory: Path) -> str:
    try:
        return regular.read_bytes(directory / "job.toml").decode(errors="replace")
    except OSError:
        return ""
