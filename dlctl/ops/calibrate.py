"""What a simulation takes from a real run: how long its work took, and how far away its servers
were. The error of a replay of that run says how much to believe.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlctl.errors import UsageError
from dlctl.records.work_times import LoopTimes, WorkTimes
from dlctl.runs import work_times
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import Snapshot, read_job
from dlctl.sim.request import SimulationRequest
from dlctl.util import hints, values

Json = dict[str, Any]
STEPS_MIN = 50
"""With fewer, nothing can be said about the spread of a step."""
WAITED_SHARE = 0.3
"""For how much of their work workers may have waited for cores. With more, the scheduler decides
how long a run takes: replays of such runs were off by up to 35 %."""
DELAYING = 0.5
"""Threads wait longer than the simulated ones, and not each time something waits for them: Linux
has a queue for each core, a virtual core takes a while to wake up, a message passes several
threads. Replays in which none of that delays anything are too fast, by up to 11 % where three
workers share two cores, and with all of it up to 6 % too slow: so half of it, give or take half."""
UNMODELLED = 0.05
"""The expected error of a time, relative, if all else is exact: one job takes some 3 % longer or
shorter the next time, and a step is a few percent longer beside another method."""
ALL = "*"
"""Key of the times of all workers together."""


@dataclass(frozen=True, slots=True)
class Calibration:
    run_id: str
    times: Mapping[str, Mapping[str, Json]]
    """Worker, or `ALL` -> kind of work -> `WorkTimes.to_json`."""
    loops: Mapping[str, Json]
    """Role -> `LoopTimes.to_json` of all its daemons."""
    cores: int
    latency_s: float
    """One way, between a worker and a server."""
    worked_s: float
    """How long the workers' compute threads were at work, together."""
    waited_s: Mapping[str, float]
    """Role -> how long its threads were ready and had no core."""
    wake_s: Mapping[str, float] = field(default_factory=dict)
    """`SimulationRequest.wake_s`."""

    @property
    def waited_share(self) -> float:
        """For how much of their work the workers waited for cores, whoever had them."""
        return self.waited_s.get("worker", 0.0) / self.worked_s if self.worked_s else 0.0

    def applied(self, request: SimulationRequest) -> SimulationRequest:
        """The request with the durations of the run."""
        step = WorkTimes.of_json(self.times[ALL]["step"])
        return replace(
            request, times=self.times, loops=self.loops, cores=request.cores or self.cores,
            latency_s=self.latency_s, step_s=step.alone_s, wake_s=self.wake_s,
        )  # fmt: skip

    def waking(self, waits: Mapping[str, Json]) -> Calibration:
        """Now with half of what threads waited longer than those of a replay without that, each
        time. waits: role -> `sim.handling.ThreadWaits` of that replay.
        """
        return replace(
            self,
            wake_s={
                role: DELAYING
                * max(0.0, self.waited_s.get(role, 0.0) - found["seconds"])
                / found["wakes"]
                for role, found in waits.items()
                if found["wakes"]
            },
        )


def of_run(snapshot: Snapshot) -> Calibration:
    """Raises UsageError for a run that says too little, or is not over yet."""
    from dlctl.job import config  # imported late: it pulls in pydantic

    if snapshot.is_live:
        raise UsageError(
            f"{snapshot.run_id} still runs, so its durations and figures are not all there",
            where=str(snapshot.directory),
            hint=hints.either(
                hints.command(f"dlctl stop -j {snapshot.run_id}", "ends it"),
                hints.command("dlctl ps", "lists others, of which one may have ended"),
            ),
        )
    recorded = work_times.read(snapshot.directory)
    hint = "run it again with this version, until it has made some hundred steps"
    kinds = sorted({kind for times in recorded.values() for kind in times.work})
    together = {
        kind: WorkTimes.together(t.work[kind] for t in recorded.values() if kind in t.work)
        for kind in kinds
    }
    steps = together.get("step", WorkTimes()).count
    if steps < STEPS_MIN:
        what = f"{snapshot.run_id} has the times of {steps} steps, and {STEPS_MIN} are needed"
        raise UsageError(what, where=str(snapshot.directory), hint=hint)
    times = {ALL: {kind: row.to_json() for kind, row in together.items()}}
    loops: dict[str, LoopTimes] = {}
    waited_s: dict[str, float] = {}
    for name, daemon in recorded.items():
        if daemon.work:
            times[name] = {kind: row.to_json() for kind, row in daemon.work.items()}
        role = name.partition("-")[0]
        waited_s[role] = waited_s.get(role, 0.0) + daemon.waited_s
        loops[role] = LoopTimes.together([loops.get(role, LoopTimes()), daemon.loop])
    return Calibration(
        snapshot.run_id,
        times,
        {role: loop.to_json() for role, loop in loops.items()},
        max(daemon.cores for daemon in recorded.values()),
        _latency_s(snapshot.directory)
        if config.of_stored(read_job(snapshot.directory)).hosts
        else SimulationRequest.latency_s,
        sum(row.wall_s for row in together.values()),
        waited_s,
    )


def _latency_s(directory: Path) -> float:
    """Between hosts: half of the median time of a fetch or, without one, of a push."""
    found: dict[str, list[float]] = {"fetch_ms_p50": [], "push_ms_p50": []}
    with closing(RunDb(directory, readonly=True)) as db:
        for row in db.daemons():
            for key, series in found.items():
                if (value := values.number((row.get("metrics") or {}).get(key))) is not None:
                    series.append(value)
    measured = found["fetch_ms_p50"] or found["push_ms_p50"]
    return statistics.median(measured) / 2000 if measured else SimulationRequest.latency_s


@dataclass(frozen=True, slots=True)
class ReplayError:
    """One figure of a run, and of its replay."""

    name: str
    real: float
    simulated: float

    @property
    def share(self) -> float | None:
        """Relative; None if the real one is 0."""
        return (self.simulated - self.real) / self.real if self.real else None


def errors(real: Mapping[str, Any], replay: Mapping[str, Any]) -> Sequence[ReplayError]:
    """Of `run_figures.of_run` of both."""
    first, second = _figures(real), _figures(replay)
    return [ReplayError(name, first[name], second[name]) for name in first]


@dataclass(frozen=True, slots=True)
class Timing:
    """Of a simulation."""

    seconds: float
    undelayed_s: float
    """The same, as if what threads wait for a core beside each other delayed nothing."""
    busy: float
    """The share of the time of all cores for which threads had one."""

    @classmethod
    def of(cls, how: Mapping[str, Any], seconds: float, undelayed_s: float) -> Timing:
        """how: what the simulator tells."""
        cores_s = how["machines"] * how["cores"] * seconds
        return cls(seconds, undelayed_s, how["used_s"] / cores_s if cores_s else 0.0)


def expected_error(errors: Sequence[ReplayError], job: Timing, replay: Timing) -> float:
    """How far off the time of a job may be, relative, as the root of the sum of squares of what is
    not known: the replay's error; what the waits delay, of which all or nothing may be true; how
    long threads wait where the cores are busier than in the run; and `UNMODELLED`.
    """
    of_time = next(error.share for error in errors if error.name == "seconds")
    of_waits = abs(job.seconds - job.undelayed_s) / job.seconds if job.seconds else 0.0
    of_load = DELAYING * max(0.0, job.busy - replay.busy)
    return math.hypot(UNMODELLED, of_time or 0.0, of_waits, of_load)


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        "seconds": row["seconds"],
        "steps per second": row["step"] / row["seconds"] if row["seconds"] else 0.0,
        "pushed bytes": row["push_bytes"],
        "fetched bytes": row["fetch_bytes"],
        "staleness": row["staleness_mean"] or 0.0,
    }
