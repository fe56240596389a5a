"""Run a job in virtual time, as a run directory that is marked as simulated."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.errors import UsageError
from dlctl.ops import calibrate, recover, run_figures, simulators
from dlctl.ops.calibrate import Calibration, ReplayError, Timing
from dlctl.ops.cases import Start
from dlctl.ops.simulators import Simulators
from dlctl.runs import paths, select
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import Snapshot, read_job
from dlctl.sim.request import SimulationRequest

if TYPE_CHECKING:
    from dlctl.job.config import JobFile

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Simulated:
    directory: Path
    figures: Json
    """`run_figures.of_run`."""
    how: Json
    """The seed, the durations and what else it was made with."""
    replay: Replay | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """Of the run whose durations a simulation has."""

    run_id: str
    errors: Sequence[ReplayError]
    expected_error: float
    """Of the time of the job that was simulated like that run, relative."""
    waited_share: float
    """For how much of their work the run's workers waited for cores."""

    @property
    def is_judged(self) -> bool:
        """Whether the errors are those of the model, and not what the scheduler made of it."""
        return self.waited_share <= calibrate.WAITED_SHARE


def simulate(
    file: Path,
    overrides: Mapping[str, Any],
    request: SimulationRequest,
    like: Snapshot | None = None,
) -> Simulated:
    """Simulate the job in a new directory beside the job's runs; `request.directory` is ignored.
    like: a run whose durations it has, and which is simulated as well, to see by how much that
    differs. Else, without `request.step_s`, a step is measured first.

    Raises UsageError for an invalid job, or one that cannot be simulated, and DlctlError for what
    fails in the user's code.
    """
    start = read(file, overrides)
    check(start.job, request)
    calibration = None if like is None else calibrate.of_run(like)
    parent = (file.parent / start.job.job.run_dir).resolve()
    directory = parent / f"{start.job.job.name}-sim-{secrets.token_hex(2)}"
    replayed = directory.with_name(f"{directory.name}-replay")
    replay = None
    request = replace(request, directory=str(directory))
    try:
        with simulators.opened(1 if like is None else 2, file) as process:
            if like is None or calibration is None:
                prepare(directory, start)
                (how,) = _ask(process, [measured(process, request)])
            else:
                plain = SimulationRequest(directory=str(replayed), seed=request.seed)
                jobs = [(start, request), (_job_of(like), plain)]
                how, replay = _simulate_like(process, calibration, jobs, like)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(replayed, ignore_errors=True)
    (directory / paths.UNFINISHED).unlink()
    return Simulated(directory, run_figures.of_run(directory), how, replay)


def _simulate_like(
    process: Simulators,
    calibration: Calibration,
    jobs: Sequence[tuple[Start, SimulationRequest]],
    like: Snapshot,
) -> tuple[Json, Replay]:
    """How the job was simulated. jobs: it, and that of the run. Both are simulated twice: how long
    the run's threads waited beside those of a replay says what the second time is with.
    """
    first = _together(process, calibration, jobs)
    undelayed_s = [_seconds(request) for _, request in jobs]
    for _, request in jobs:
        shutil.rmtree(request.directory)
    second = _together(process, calibration.waking(first[1]["waits"]), jobs)
    of_job, of_run = (
        Timing.of(how, _seconds(request), before_s)
        for how, (_, request), before_s in zip(second, jobs, undelayed_s, strict=True)
    )
    replayed = Path(jobs[1][1].directory)
    errors = calibrate.errors(run_figures.of_run(like.directory), run_figures.of_run(replayed))
    expected = calibrate.expected_error(errors, of_job, of_run)
    return second[0], Replay(like.run_id, errors, expected, calibration.waited_share)


def _seconds(request: SimulationRequest) -> float:
    """Of the run in its directory."""
    return float(run_figures.of_run(Path(request.directory))["seconds"])


def with_waits(
    process: Simulators, calibration: Calibration, like: Snapshot, directory: Path
) -> Calibration:
    """With what the run's threads waited, from a replay in that directory, which is removed."""
    try:
        request = SimulationRequest(directory=str(directory))
        (how,) = _together(process, calibration, [(_job_of(like), request)])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return calibration.waking(how["waits"])


def _together(
    process: Simulators,
    calibration: Calibration,
    jobs: Sequence[tuple[Start, SimulationRequest]],
) -> list[Json]:
    for start, request in jobs:
        prepare(Path(request.directory), start)
    return _ask(process, [calibration.applied(request) for _, request in jobs])


def _ask(process: Simulators, requests: Sequence[SimulationRequest]) -> list[Json]:
    """How each was made. Raises the first error."""
    answers = process.ask(requests)
    for answer in answers:
        if (error := simulators.error_in(answer)) is not None:
            raise error
    return [answer["simulated"] for answer in answers]


def _job_of(run: Snapshot) -> Start:
    """The job of a run, until the step that it has reached."""
    from dlctl.job import config

    content = read_job(run.directory)
    job = config.of_stored(content)
    if run.state != "finished":
        stop = replace(job.job.stop, steps=max(1, int(run.run.get("step") or 1)))
        job = replace(job, job=replace(job.job, stop=stop))
        content = json.loads(json.dumps(config.to_dict(job)))
    return Start(run.directory / "job.toml", job, content)


def read(file: Path, overrides: Mapping[str, Any]) -> Start:
    """The job of a file, with other values of some keys. Raises UsageError."""
    from dlctl import jobfile
    from dlctl.job import config  # imported late: they pull in pydantic

    job = jobfile.load(file, overrides)
    return Start(file, job, json.loads(json.dumps(config.to_dict(job))))


def check(job: JobFile, request: SimulationRequest) -> None:
    """Raises UsageError for a job that the simulator cannot run, naming the key."""
    from dlctl import registry

    shape = registry.load("algorithms", job.algorithm.name).shape
    faults = {
        "[job] script has a training loop of its own": job.has_loop,
        "[[parties]] divide the model, and a loss waits for the head's answer": shape.is_divided,
        "[replica] has several processes": job.ranks > 1 or job.replica.hogwild > 1,
        f"{job.algorithm.name} shares memory between processes": "memory" in shape.links,
    }
    found = [what for what, is_so in faults.items() if is_so]
    if found:
        raise UsageError(
            f"this job cannot be simulated: {'; '.join(found)}",
            hint="try a short run of it, with stop = { steps = 100 }"
            if shape.is_divided
            else "simulate it with one process per worker, as a task",
        )
    count = job.workers.count
    unknown = [name for name in request.slow if int(name.rpartition("-")[2]) >= count]
    if unknown:
        raise UsageError(
            f"--slow: the job has no {', '.join(unknown)}: it has {count} workers",
            hint="--workers says how many to simulate",
        )


def prepare(directory: Path, start: Start) -> None:
    """Make the directory of a run that is to be simulated."""
    directory.mkdir(mode=paths.PRIVATE, parents=True)
    (directory / paths.UNFINISHED).touch()
    (directory / paths.SIMULATED).touch()
    (directory / "logs").mkdir()
    recover.write(directory, recover.job_files(start))
    with closing(RunDb(directory, create=True)) as db:
        row = recover.first_row(directory, select.job_file(start.file), start.job, None)
        db.put_run(**row)
        db.commit()


def measured(process: Simulators, request: SimulationRequest) -> SimulationRequest:
    """The request with durations that were measured on this machine, unless it has them. Raises
    DlctlError.
    """
    if request.step_s is not None:
        return request
    return replace(request, **asked(process, request)["measured"])


def asked(process: Simulators, request: SimulationRequest) -> Json:
    """The answer to one request. Raises DlctlError."""
    (answer,) = process.ask([request])
    if (error := simulators.error_in(answer)) is not None:
        raise error
    return answer
