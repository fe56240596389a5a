"""Simulate a window of a run without gradients, for more workers than anyone could compute."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.errors import UsageError
from dlctl.ops import calibrate, simulate, simulators
from dlctl.ops.simulators import Simulators
from dlctl.runs.snapshot import Snapshot
from dlctl.sim.request import SimulationRequest
from dlctl.study import saturation
from dlctl.study.saturation import Saturation

if TYPE_CHECKING:
    from dlctl.job.config import JobFile

Json = dict[str, Any]
SMALLER = 4
"""Another window has a fourth of the workers: what grows with them is seen."""
FEW, FEW_SHARE = 16, 0.15
"""Workers of the first window, who rarely wait for each other, and its share of the time at least;
what it does not take is for the larger ones.
"""


@dataclass(frozen=True, slots=True)
class ProtocolWindow:
    request: SimulationRequest
    windows: tuple[Json, ...]
    """The smaller ones first; the last one has all workers."""
    first: Saturation | None
    error: float | None
    """Of an extrapolation from the smaller window (`saturation.error`)."""

    @property
    def largest(self) -> Json:
        return self.windows[-1]


def simulate_protocol(
    file: Path,
    overrides: Mapping[str, Any],
    request: SimulationRequest,
    like: Snapshot | None,
    within_s: float,
) -> ProtocolWindow:
    """Raises UsageError for a job that cannot be simulated so, and DlctlError for a task whose
    model cannot be built. within_s: CPU time for all of it.
    """
    start = simulate.read(file, overrides)
    simulate.check(start.job, request)
    _check(start.job)
    calibration = None if like is None else calibrate.of_run(like)
    parent = (file.parent / start.job.job.run_dir).resolve()
    directory = parent / f"{start.job.job.name}-sim-{secrets.token_hex(2)}"
    most = start.job.workers.count
    windows: list[Json] = []
    try:
        with simulators.opened(1, file) as process:
            simulate.prepare(directory, start)
            request = replace(request, directory=str(directory))
            request = _measured(process, request)
            if calibration is not None and like is not None:
                place = directory / "replay"
                calibration = simulate.with_waits(process, calibration, like, place)
                request = calibration.applied(request)
            left_s, sizes = within_s, _sizes(most)
            for number, count in enumerate(sizes):
                place = directory / f"of-{count}"
                simulate.prepare(place, simulate.read(file, {**overrides, "workers.count": count}))
                may_s = _share(sizes[number:]) * left_s
                one = replace(request, directory=str(place), protocol_s=may_s)
                windows.append(simulate.asked(process, one)["simulated"])
                left_s = max(0.0, left_s - windows[-1]["cpu_s"])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return ProtocolWindow(
        request, tuple(windows), saturation.first(windows), saturation.error(windows)
    )


def _sizes(most: int) -> list[int]:
    """Workers of each window."""
    smaller = max(1, most // SMALLER)
    return sorted({min(FEW, smaller), smaller, most})


def _share(sizes: Sequence[int]) -> float:
    """Of the CPU time that is left, what the first of these windows may take: a second of one costs
    about as much as it has workers.
    """
    return max(sizes[0] / sum(sizes), FEW_SHARE)


def _check(job: JobFile) -> None:
    """Raises UsageError for what needs gradients."""
    from dlctl import registry

    shape = registry.load("algorithms", job.algorithm.name).shape
    if shape.engine:
        raise UsageError(
            f"--protocol leaves gradients out, and {job.algorithm.name} works with the model",
            hint="simulate it without --protocol, with fewer workers",
        )


def _measured(process: Simulators, request: SimulationRequest) -> SimulationRequest:
    """The request with the durations of a step, and the size of the model."""
    answer = simulate.asked(process, replace(request, step_s=None))
    given = {} if request.step_s is None else {"step_s": request.step_s}
    request = replace(request, **{**answer["measured"], **given})
    if not request.parameters:
        request = replace(request, parameters=answer["parameters"])
    return request
