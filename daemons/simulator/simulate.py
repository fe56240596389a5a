"""One simulated run, in a process of its own."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from daemons.process import read_job
from daemons.simulator import plain, run_directory
from daemons.simulator.compute import TorchCompute
from daemons.simulator.costs import Costs, Durations, Lognormal, Recorded
from daemons.simulator.kills import Killer
from daemons.simulator.measuring import measure
from daemons.simulator.protocol import ProtocolRun
from daemons.simulator.sums import RingSums
from daemons.simulator.surroundings import handling_of, network_of
from daemons.simulator.watching import RunWatcher
from dlctl.errors import DlctlError
from dlctl.job.config import JobFile
from dlctl.records.work_times import WorkTimes
from dlctl.sim.request import SimulationRequest
from dlctl.sim.simulation import Simulation
from dlctl.util import cores
from dlctl.wire.messages import Json


def answer(line: str) -> Json:
    """The answer to a request, or the error."""
    logging.getLogger("dlctl").setLevel(logging.ERROR)  # What the replicas say is in no log.
    request = SimulationRequest.of_json(json.loads(line))
    directory = Path(request.directory)
    try:
        done = simulate(request, directory, read_job(directory))
    except DlctlError as error:
        facts = {"message": error.message, "where": error.where, "hint": error.hint}
        return {"directory": request.directory, "error": facts, "exit_code": error.exit_code}
    except Exception:
        facts = {"message": traceback.format_exc(), "where": None, "hint": None}
        return {"directory": request.directory, "error": facts, "exit_code": 1}
    return {"directory": request.directory, **done}


def simulate(request: SimulationRequest, directory: Path, job: JobFile) -> Json:
    """Run it, and fill the directory; or only measure. Raises DlctlError."""
    job = replace(
        job,
        workers=replace(job.workers, loader_processes=0),
        checkpoints=replace(job.checkpoints, mirror=""),
    )
    request = replace(request, cores=request.cores or cores.usable())
    if request.step_s is None:
        times, facts = measure(job, directory)
        return {"measured": asdict(times), **asdict(facts)}
    if request.protocol_s is not None:
        until = time.process_time() + request.protocol_s
        return {"simulated": ProtocolRun(request, job, until).window()}
    began = time.perf_counter()
    slow = {
        slot: factor for name, factor in request.slow.items() if (slot := _slot(name)) is not None
    }
    durations = Durations(
        step=Lognormal(
            median_s=request.step_s, sigma=request.spread, core_share=request.core_share
        ),
        evaluation=Lognormal(median_s=request.evaluation_s, sigma=request.spread),
        build=Lognormal(median_s=request.build_s),
        slow=slow,
        recorded={_slot(name): _recorded(kinds) for name, kinds in request.times.items()},
    )
    costs = Costs(durations, request.seed)
    handling = handling_of(request, job)
    if request.is_plain:
        return plain.train(request, directory, job, costs)
    compute = TorchCompute(job, directory, costs, handling)
    network, watcher = network_of(request), RunWatcher()
    simulation = Simulation(
        job, compute, request.seed, network=network, checkers=(watcher,), handling=handling
    )
    simulation.world.groups.costs = RingSums(handling, costs, request.link)
    killer = Killer(simulation.world, request.kill_every_s, request.seed)
    outcome = simulation.run(request.until_s)
    mark: Json = {
        "seed": request.seed,
        "step_s": request.step_s,
        "spread": request.spread,
        "evaluation_s": request.evaluation_s,
        "cores": request.cores,
        "real_s": time.perf_counter() - began,
        "killed": killer.killed,
        **watcher.to_json(),
        "digest": outcome.digest,
    }
    run_directory.write(directory, outcome, time.time(), mark)
    return {"simulated": mark}


def _slot(name: str) -> int | None:
    """None: "*", all others."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else None


def _recorded(kinds: Mapping[str, Json]) -> dict[str, Recorded]:
    times = {kind: WorkTimes.of_json(row) for kind, row in kinds.items()}
    return {kind: Recorded(row) for kind, row in times.items() if row.count}
