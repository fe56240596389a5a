"""One simulated run, in a process of its own."""

from __future__ import annotations

import json
import logging
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

from daemons.process import read_job
from daemons.simulator import plain, run_directory
from daemons.simulator.compute import TorchCompute
from daemons.simulator.costs import Costs, Durations
from daemons.simulator.kills import Killer
from daemons.simulator.measuring import measure
from daemons.simulator.protocol import ProtocolRun
from daemons.simulator.sums import RingSums
from daemons.simulator.surroundings import handling_of, network_of
from daemons.simulator.watching import RunWatcher
from dlctl.errors import DlctlError
from dlctl.job.config import JobFile
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
    costs = Costs(Durations.of_request(request), request.seed)
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
        "machines": len(handling.machines),
        "used_s": sum(cores.used_s for cores in handling.machines.values()),
        "waits": {role: asdict(waits) for role, waits in handling.waits().items()},
        "real_s": time.perf_counter() - began,
        "killed": killer.killed,
        **watcher.to_json(),
        "digest": outcome.digest,
    }
    run_directory.write(directory, outcome, time.time(), mark)
    return {"simulated": mark}
