"""The jobs of a sweep's trials: a file with other values of some keys, in full or shortened."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.errors import UsageError
from dlctl.job import batches, schedule
from dlctl.ops import changes, simulate
from dlctl.ops.cases import Start
from dlctl.study import space

if TYPE_CHECKING:
    from dlctl.job.config import JobFile

Json = dict[str, Any]
LENGTHS = ("epochs", "steps", "samples")


class JobFileChanged(UsageError):
    """The trials to come would not be comparable with those that have ended."""


def samples(axes: Mapping[str, space.Axis]) -> Iterator[Json]:
    """Points that have every value of every choice, and both ends of every interval."""
    values = {
        key: axis.values
        if isinstance(axis, space.Choices)
        else tuple(int(v) if axis.is_whole else v for v in (axis.low, axis.high))
        for key, axis in axes.items()
    }
    for n in range(max(map(len, values.values()))):
        yield {key: each[min(n, len(each) - 1)] for key, each in values.items()}


def check(job: JobFile, pruner: str) -> None:
    """Raises UsageError for a job whose trials may never end, or cannot be shortened."""
    stop = job.job.stop
    if not stop.limits:
        raise UsageError(
            "a trial that does not reach the target would never end",
            where="job.stop",
            hint="add epochs, steps, samples or seconds to stop in [job]",
        )
    if pruner == "none":
        return
    if not stop.limits.keys() & set(LENGTHS):
        raise UsageError(
            "a pruner needs a job that stops after epochs, steps or samples",
            where="job.stop",
            hint="add epochs, steps or samples to stop in [job], or leave out --pruner",
        )
    if schedule.needs_whole(job.schedule) and not job.schedule.over and not _whole(job):
        raise UsageError(
            "the schedule goes by the length of the run, which is not known in samples, so a "
            "pruner cannot shorten the run without changing its rates",
            where="schedule.over",
            hint='add over = "50_000 samples" to [schedule], the length of the whole job',
        )


def content(file: Path, axes: Mapping[str, space.Axis]) -> Json:
    """The resolved job, with one value for each key that is varied: what the file says of those
    does not count. Raises UsageError for an invalid file.
    """
    return simulate.read(file, next(samples(axes))).content


def check_same(file: Path, axes: Mapping[str, space.Axis], before: Json, sweep: Path) -> None:
    """Raises JobFileChanged if the job is not that which the sweep has begun with."""
    again = f"dlctl sweep resume {sweep}\nwhen the file is again what it was"
    try:
        now = content(file, axes)
    except UsageError as error:
        what = f"the job file of the sweep cannot be read any more: {error.message}"
        raise JobFileChanged(what, where=error.where or str(file), hint=again) from None
    if changed := changes.differences(before, now):
        what = "; ".join(change.text() for change in changed)
        raise JobFileChanged(
            f"the job file is not that of the sweep: {what}",
            where=str(file),
            hint=f"{again}\nor: dlctl sweep {file} --set KEY=VALUES\nbegins a new sweep",
        )


def read(file: Path, values: Mapping[str, Any], share: float) -> Start:
    """The job of a trial, with this share of its length. A schedule stays that of the whole job: it
    is the same training up to there. Raises UsageError.
    """
    start = simulate.read(file, values)
    if share == 1.0:
        return start
    stop, shorter = start.job.job.stop, dict(values)
    for key, value in stop.limits.items():
        if key in LENGTHS:
            part = value * share
            shorter[f"job.stop.{key}"] = part if key == "epochs" else max(1, round(part))
    if over := _whole(start.job):
        shorter["schedule.over"] = over
    return simulate.read(file, shorter)


def _whole(job: JobFile) -> str:
    """`schedule.over` for the length by `job.stop`; "" if that is not needed, or not known."""
    stop = job.job.stop
    if job.schedule.over or not schedule.is_needed(job.schedule) or stop.epochs is not None:
        return ""
    whole = math.inf if batches.is_open(job) and stop.steps else schedule.whole_run(job, 0)
    if math.isinf(whole):
        return ""
    return f"{stop.samples} samples" if whole == stop.samples else f"{stop.steps} steps"
