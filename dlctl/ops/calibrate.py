"""What a simulation takes from a real run: how long its work took, and how far away its servers
were. The error of a replay of that run says how much to believe.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlctl.errors import UsageError
from dlctl.records.work_times import LoopTimes, WorkTimes
from dlctl.runs import work_times
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import Snapshot, read_job
from dlctl.runs.work_times import DaemonTimes
from dlctl.sim.request import SimulationRequest
from dlctl.util import hints, values

Json = dict[str, Any]
STEPS_MIN = 50
"""With fewer, nothing can be said about the spread of a step."""
OTHERS_SHARE = 0.2
"""Of the time at work that threads may have waited for cores that other programs had."""
UNMODELLED = 0.1
"""The expected error of a time, relative, however good the replay is."""
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
    others_s: float
    """How long the threads of all daemons were ready, and other programs had the cores."""

    @property
    def is_judged(self) -> bool:
        """Whether the error of a replay says something about the model, and not about what else
        the machine did at that time.
        """
        return self.others_s <= OTHERS_SHARE * self.worked_s

    def applied(self, request: SimulationRequest) -> SimulationRequest:
        """The request with the durations of the run."""
        step = WorkTimes.of_json(self.times[ALL]["step"])
        return replace(
            request, times=self.times, loops=self.loops, cores=request.cores or self.cores,
            latency_s=self.latency_s, step_s=step.alone_s,
        )  # fmt: skip


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
    for name, daemon in recorded.items():
        if daemon.work:
            times[name] = {kind: row.to_json() for kind, row in daemon.work.items()}
        role = name.partition("-")[0]
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
        _others_s(recorded.values()),
    )


def _others_s(daemons: Collection[DaemonTimes]) -> float:
    """A thread waits while all cores are busy, for other programs as much as these make them so:
    on a machine with few cores it is the run's own threads for which most wait.
    """
    waited_s, used_s = sum(d.waited_s for d in daemons), sum(d.used_s for d in daemons)
    # Workers begin last, when the others have imported all.
    busy_s = statistics.median(daemon.busy_s for daemon in daemons if daemon.work)
    return waited_s * (max(0.0, 1 - used_s / busy_s) if busy_s else 1.0)


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


def expected_error(errors: Sequence[ReplayError]) -> float:
    """How far off the time of another job may be, relative. A replay may be right by chance: other
    jobs were off by up to 10.5 % where it was by 1 (the benchmark `foretold`)."""
    of_time = next(error.share for error in errors if error.name == "seconds")
    return max(UNMODELLED, abs(of_time or 0.0))


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        "seconds": row["seconds"],
        "steps per second": row["step"] / row["seconds"] if row["seconds"] else 0.0,
        "pushed bytes": row["push_bytes"],
        "fetched bytes": row["fetch_bytes"],
        "staleness": row["staleness_mean"] or 0.0,
    }
