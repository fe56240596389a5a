"""Two things that hold of whatever a shard side computes, for methods that are tried
(`try_method.py`): a run of one replica ends with the same parameters on one server and on two, and
if it was stopped in between. No other loop is needed to compare with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from account import NEAR
from simulated import job_file

from dlctl import registry
from dlctl.algorithms.base import Method
from dlctl.job import config
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.sim.store import Store
from dlctl.wire.messages import Array

BATCH_SIZE, EPOCHS, STOPPED_AFTER = 4, 3, 1
PORTIONS = 12
"""Of an epoch."""


def differences(
    name: str, options: dict[str, Any], optimizer: str, lr: float, seed: int
) -> list[str]:
    """What is wrong, [] if nothing is; lr: the servers' rate. A resumed run is looked at where all
    steps of a replica are in its pushes: else it may have given some away when it stopped.
    """
    method: Method = registry.load("algorithms", name)
    known = method.Options.__dataclass_fields__
    options = ({"overlap": False} if "overlap" in known else {}) | options
    given = method.Options(**{key: value for key, value in options.items() if key in known})
    # A portion is a round, so that none is cut short by the end of the run that is stopped.
    portion = getattr(given, "local_steps", 4)
    problem = LeastSquares(samples=PORTIONS * portion * BATCH_SIZE, noise=0.5)

    def run(servers: int, epochs: int, store: Store | None = None) -> tuple[Array, Store]:
        job = job_file(
            1, servers, algorithm=(name, options), optimizer=(optimizer, {"lr": lr}),
            epochs=float(epochs), batch_size=BATCH_SIZE, seed=seed,
        )  # fmt: skip
        # Nothing depends on how long things take.
        job = replace(job, data=config.Data(portion_batches=portion, lease_ahead_s=0.0))
        outcome = Simulation(job, problem, seed, store=store).run()
        if outcome.state != "finished":
            raise RuntimeError(f"a run of one replica has not finished: {outcome.reason}")
        return outcome.weights, outcome.store

    ends = {}
    try:
        whole, _ = run(2, EPOCHS)
        ends["on one server"], _ = run(1, EPOCHS)
        if method.push_kind(given).is_all:
            _, stopped = run(2, STOPPED_AFTER)
            ends["when it was stopped in between"], _ = run(2, EPOCHS, stopped)
    except RuntimeError as error:
        return [str(error)]
    way = np.linalg.norm(whole - problem.initial())
    return [
        f"a run of one replica on two servers ends {apart:.3g} away from where it ends {what}, "
        f"after a way of {way:.3g} from the start"
        for what, other in ends.items()
        if not (apart := np.linalg.norm(other - whole)) <= NEAR * way
    ]
