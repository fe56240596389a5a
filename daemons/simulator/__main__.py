"""Simulate a run: `python -m daemons.simulator < REQUEST`, JSON of `dlctl.sim.request`.

Prints a line of JSON, the run's outcome; an error is one line of JSON on standard error.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from daemons.process import print_error, read_job
from daemons.simulator import run_directory
from daemons.simulator.compute import TorchCompute
from daemons.simulator.costs import Costs, Durations, Lognormal
from daemons.simulator.kills import Killer
from daemons.simulator.measuring import MeasuredTimes, measure
from daemons.simulator.summary import summary_of
from dlctl.errors import DlctlError
from dlctl.job.config import JobFile
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.request import SimulationRequest
from dlctl.sim.simulation import Simulation
from dlctl.wire.messages import Json


def main() -> int:
    logging.getLogger("dlctl").setLevel(logging.ERROR)  # What the replicas say is in no log.
    request = SimulationRequest.of_json(json.load(sys.stdin))
    directory = Path(request.directory)
    # The task may print; standard output is the outcome's.
    answer, sys.stdout = sys.stdout, sys.stderr
    try:
        print(json.dumps(simulate(request, directory, read_job(directory))), file=answer)
    except DlctlError as error:
        print_error(error)
        return error.exit_code
    return 0


def simulate(request: SimulationRequest, directory: Path, job: JobFile) -> Json:
    """Run it, and fill the directory. Raises DlctlError."""
    times = _times(request, job, directory)
    began = time.perf_counter()
    job = replace(job, workers=replace(job.workers, loader_processes=0))
    slow = {int(name.rpartition("-")[2]): factor for name, factor in request.slow.items()}
    durations = Durations(
        step=Lognormal(median_s=times.step_s, sigma=times.spread),
        evaluation=Lognormal(median_s=times.evaluation_s, sigma=times.spread),
        build=Lognormal(median_s=times.build_s),
        slow=slow,
    )
    compute = TorchCompute(job, directory, Costs(durations, request.seed))
    simulation = Simulation(job, compute, seed=request.seed, network=_network(request, job))
    killer = Killer(simulation.world, request.kill_every_s, request.seed)
    outcome = simulation.run(request.until_s)
    mark: dict[str, Any] = {
        "seed": request.seed,
        "step_s": times.step_s,
        "spread": times.spread,
        "evaluation_s": times.evaluation_s,
        "is_measured": request.step_s is None,
        "real_s": time.perf_counter() - began,
        "killed": killer.killed,
        "digest": outcome.digest,
    }
    run_directory.write(directory, outcome, time.time(), mark)
    return {**summary_of(outcome), "simulated": mark}


def _times(request: SimulationRequest, job: JobFile, directory: Path) -> MeasuredTimes:
    if request.step_s is not None:
        evaluation_s = request.step_s if request.evaluation_s is None else request.evaluation_s
        return MeasuredTimes(request.step_s, request.spread, evaluation_s, 1.0)
    return measure(job, directory)


def _network(request: SimulationRequest, job: JobFile) -> NetworkOptions:
    if request.link is None:
        return NetworkOptions()
    link = request.link
    return NetworkOptions(
        link=SimLink(latency_s=link.latency_s),
        card_bytes_per_s=link.bytes_per_s,
        machines={"agent-0": "coordinator"},
    )


sys.exit(main())
