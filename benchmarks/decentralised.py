"""Servers beside the workers, in virtual time: how evenly the links of hosts are used, and a step
behind 100 Mbit/s, against one server for all and against the least that a ring can take.

The run is `sync` with one worker on each of N hosts. Its roles, messages and bytes are real; time
and links are simulated, so the figures are the same on any machine.
"""

from __future__ import annotations

import sys
from statistics import mean

import numpy as np

from benchmarks.figures import Figure
from dlctl.job import config
from dlctl.job.config import Choice, Host, JobFile
from dlctl.jobfile import shares
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import Batch, layout_of
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire.messages import Array, Json

CHAPTER = "decentralised"
HOSTS = range(2, 9)
SIZE, STEPS, BATCH = 100_000, 20, 8
BYTES_PER_S, LATENCY_S, STEP_S = 100e6 / 8, 0.0005, 0.001
RATIO_ASKED = 1.1


class Bowl:
    """The distance to a point that differs from sample to sample."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.layout = layout_of(SIZE)

    def initial(self) -> Array:
        return np.zeros(SIZE, np.float32)

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        way = w - np.float32(1 + batch.rows.mean() / self.samples)
        return float(way @ way) / SIZE, way

    def averaged(self, before: Array, batch: Batch) -> Array:
        return before

    def evaluate(self, w: Array) -> Json:
        return {"loss": float(w @ w) / SIZE}


def measure(*, quick: bool) -> list[Figure]:
    """quick: two hosts only."""
    found = []
    for hosts in HOSTS if not quick else (2,):
        found += _of(hosts)
    return found


def _of(hosts: int) -> list[Figure]:
    beside, central = (run(hosts, is_beside=is_beside) for is_beside in (True, False))
    fullest, of_one = (max(_sums(each)) / mean(_sums(each)) for each in (beside, central))
    is_same = beside.weights.tobytes() == central.weights.tobytes()
    even = Figure(
        CHAPTER, f"{hosts} hosts: bytes of the fullest link / mean", "x", (fullest,), RATIO_ASKED,
        f"one server for all: {of_one:.2f}; a host sends {_sums(beside)[0] / 2 / STEPS / 1e3:.0f}"
        f" kB and receives as much in a step; the same model bit for bit: {is_same}",
        failed="" if is_same else "another model than one server's",
    )  # fmt: skip
    ring_s = 2 * (hosts - 1) / hosts * 4 * SIZE / BYTES_PER_S
    ours_s, central_s = (_step_s(each) for each in (beside, central))
    step = Figure(
        CHAPTER, f"{hosts} hosts, 100 Mbit/s: a step / the least of a ring", "x",
        (ours_s / ring_s,), None,
        f"{1e3 * ours_s:.0f} ms, a ring {1e3 * ring_s:.0f} ms, one server {1e3 * central_s:.0f} ms",
    )  # fmt: skip
    for figure in (even, step):
        print(f"  {figure.what}: {figure.values[0]:.3f}; {figure.detail}", file=sys.stderr)
    return [even, step]


def run(hosts: int, *, is_beside: bool) -> Outcome:
    """A worker on each host, one portion for each; and a server on each, or one on the first."""
    job = JobFile(
        job=config.Job(name="decentralised", task="none", stop=config.Stop(epochs=1.0)),
        algorithm=Choice(name="sync", options={"backup_workers": 0}),
        optimizer=Choice(name="sgd", options={"lr": 0.1}),
        servers=config.Servers(placement="workers" if is_beside else "spread", count=1),
        workers=config.Workers(count=hosts, batch_size=BATCH),
        data=config.Data(portion_batches=STEPS, lease_ahead_s=0.0),
        checkpoints=config.Checkpoints(every_s=0.0),
        evaluation=config.Evaluation(every_epochs=0.0),
        hosts=tuple(Host(ssh=f"h{n}") for n in range(hosts)),
    )
    job = shares.counted(job)
    # Worker i and server i are on host i; the one server for all is on the first.
    names = {f"{role}-{n}": f"h{n}" for role in ("worker", "server") for n in range(hosts)}
    network = NetworkOptions(
        link=SimLink(latency_s=LATENCY_S), card_bytes_per_s=BYTES_PER_S,
        machines={"agent-0": "coordinator", **names},
    )  # fmt: skip
    problem = Bowl(hosts * STEPS * BATCH)
    compute = ComputeOptions(step_s=STEP_S)
    outcome = Simulation(job, problem, network=network, compute=compute).run()
    if outcome.state != "finished":
        raise RuntimeError(f"the simulated run has {outcome.state}: {outcome.reason}")
    return outcome


def _sums(outcome: Outcome) -> list[int]:
    """The bytes of each link, in both directions."""
    rows = outcome.store.run["links"].values()
    return [row["out_bytes"] + row["in_bytes"] for row in rows]


def _step_s(outcome: Outcome) -> float:
    """Virtual seconds of a step, without the start and the end of the run."""
    return float(outcome.store.run["totals"]["seconds"]) / STEPS
