"""Run a job in virtual time, in a process of its own, as a run directory that is marked."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.errors import UsageError
from dlctl.ops import other_process, recover
from dlctl.ops.cases import Start
from dlctl.runs import paths, select
from dlctl.runs.database import RunDb
from dlctl.sim.request import SimulationRequest

if TYPE_CHECKING:
    from dlctl.job.config import JobFile

Json = dict[str, Any]
MODULE = "daemons.simulator"


@dataclass(frozen=True, slots=True)
class Simulated:
    directory: Path
    outcome: Json
    """That of `daemons/simulator/summary.py`, and "simulated": how it was made."""


def simulate(file: Path, overrides: Mapping[str, Any], request: SimulationRequest) -> Simulated:
    """Simulate the job in a new directory beside the job's runs; `request.directory` is ignored.

    Raises UsageError for an invalid job, or one that cannot be simulated, and DlctlError for what
    fails in the user's code.
    """
    start = read(file, overrides)
    check(start.job)
    _check_names(request, start.job)
    parent = (file.parent / start.job.job.run_dir).resolve()
    directory = parent / f"{start.job.job.name}-sim-{secrets.token_hex(2)}"
    directory.mkdir(mode=paths.PRIVATE, parents=True)
    (directory / paths.UNFINISHED).touch()
    try:
        _write_job(directory, start)
        request = replace(request, directory=str(directory))
        outcome = ask(request, file)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    (directory / paths.UNFINISHED).unlink()
    return Simulated(directory, outcome)


def read(file: Path, overrides: Mapping[str, Any]) -> Start:
    """The job of a file, with other values of some keys. Raises UsageError."""
    from dlctl import jobfile
    from dlctl.job import config  # imported late: they pull in pydantic

    job = jobfile.load(file, overrides)
    return Start(file, job, json.loads(json.dumps(config.to_dict(job))))


def check(job: JobFile) -> None:
    """Raises UsageError for a job that the simulator cannot run, naming the key."""
    from dlctl import registry

    shape = registry.load("algorithms", job.algorithm.name).shape
    faults = {
        "[job] script has a training loop of its own": job.has_loop,
        "[replica] has several processes": job.ranks > 1 or job.replica.hogwild > 1,
        f"{job.algorithm.name} shares memory between processes": "memory" in shape.links,
    }
    found = [what for what, is_so in faults.items() if is_so]
    if found:
        raise UsageError(
            f"this job cannot be simulated: {'; '.join(found)}",
            hint="simulate it with one process per worker, as a task",
        )


def _check_names(request: SimulationRequest, job: JobFile) -> None:
    unknown = [name for name in request.slow if int(name.rpartition("-")[2]) >= job.workers.count]
    if unknown:
        raise UsageError(
            f"--slow: the job has no {', '.join(unknown)}: it has {job.workers.count} workers",
            hint="--workers says how many to simulate",
        )


def ask(request: SimulationRequest, file: Path) -> Json:
    """The outcome of one simulation. Raises DlctlError."""
    output = other_process.run(
        MODULE, [], file, "the simulation failed", input=json.dumps(request.to_json())
    )
    answer: Json = json.loads(output.splitlines()[0])
    return answer


def _write_job(directory: Path, start: Start) -> None:
    (directory / "logs").mkdir()
    recover.write(directory, recover.job_files(start))
    with closing(RunDb(directory, create=True)) as db:
        row = recover.first_row(directory, select.job_file(start.file), start.job, None)
        db.put_run(**row)
        db.commit()
    (directory / paths.SIMULATED).touch()
