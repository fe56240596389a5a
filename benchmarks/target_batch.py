"""A round of `target-batch` with parts of the model by bandwidth, against equal parts.

Four hosts serve, with links of 10, 10, 1 and 1. In the simulator, where only links take time:

- workers elsewhere: four workers on hosts of their own with fast links. Each server receives four
  parts and sends them; parts like the bandwidths take 4 / 22 of the time of equal ones.
- beside, shared links: a worker on each of the four hosts, and both directions of a link share its
  rate, which is the problem of DeDLOC and hivemind. No parts are faster than 2 / 3.
- beside, a rate each way: equal parts are the best ones.

Beside servers a round of n hosts cannot take less than 1 / (2 - 2/n) of the time of equal parts,
whatever the parts, their order or relays: a host that serves nothing sends its gradient and
receives the model, V each, and one with V/n sends and receives (2 - 2/n) V. So 0.6 takes more than
six hosts; it is asked of workers elsewhere.

Behind shaped links: the first one on real processes, with the hosts in network namespaces (100 and
10 Mbit/s). The times come from the run's own steps, a while after the start.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.figures import Figure, ratio
from benchmarks.sandbox import Dlctl, sandbox
from dlctl.job import config
from dlctl.sim.checkers.base import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.wire.machine import Send
from dlctl.wire.messages import Decided
from tests.hosts.cluster import Cluster, missing

CHAPTER = "target_batch"
RATES = (10.0, 10.0, 1.0, 1.0)
ASKED = 0.6
BATCH, SIZE, ROUNDS = 4, 40_000, 10
BYTES_PER_S = 1e6
"""Of a link of rate 1."""
Layout = Literal["equal", "bandwidth", "shared-bandwidth"]


class Case(NamedTuple):
    what: str
    layout: Layout
    beside: bool
    """Worker i is on the host of server i; else all are on hosts with fast links."""
    is_duplex: bool
    asked: float | None


CASES = (
    Case("workers elsewhere", "bandwidth", beside=False, is_duplex=True, asked=ASKED),
    Case("beside, shared links", "shared-bandwidth", beside=True, is_duplex=False, asked=0.7),
    Case("beside, a rate each way", "bandwidth", beside=True, is_duplex=True, asked=1.02),
)


def measure(*, quick: bool) -> list[Figure]:
    figures = []
    for case in CASES:
        equal_s, ours_s = (simulated_s(layout, case) for layout in ("equal", case.layout))
        what = f"a round by bandwidth / in equal parts: {case.what}, simulated"
        figures.append(ratio(CHAPTER, what, [ours_s], [equal_s], case.asked))
    return [*figures, _shaped(quick=quick)]


# ---------------------------------------------------------------- simulated


class _Decisions(Checker):
    """When each step was decided."""

    def __init__(self) -> None:
        self.at_s: dict[int, float] = {}

    def on_effect(self, process: Any, effect: Any) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, Decided):
            self.at_s.setdefault(effect.message.clock, process.timeline.now)


def simulated_s(layout: Layout, case: Case, rates: tuple[float, ...] = RATES) -> float:
    """Simulated seconds of a round in which only links take time."""
    seen = _Decisions()
    simulation = linked(
        of_links(layout, rates, beside=case.beside), rates, beside=case.beside,
        is_duplex=case.is_duplex,
    )  # fmt: skip
    simulation.world.observers.append(seen)
    outcome = simulation.run(1e5)
    if outcome.state != "finished":
        raise RuntimeError(f"a simulated run is {outcome.state}: {outcome.reason}")
    first, *_, last = sorted(seen.at_s)[1:-1]
    return (seen.at_s[last] - seen.at_s[first]) / (last - first)


def linked(
    job: config.JobFile, rates: tuple[float, ...], *, beside: bool = False, is_duplex: bool = True,
    checkers: tuple[Checker, ...] = (),
) -> Simulation:  # fmt: skip
    """A run on hosts with such links, where nothing else takes time."""
    hosts = [f"h{n}" for n in range(len(rates))]
    machines = {f"server-{n}": host for n, host in enumerate(hosts)}
    if beside:
        machines |= {f"worker-{n}": host for n, host in enumerate(hosts)}
    return Simulation(
        job, LeastSquares(samples=512, size=SIZE), 1,
        compute=ComputeOptions(step_s=0.001, spread=0.0),
        network=NetworkOptions(
            link=SimLink(latency_s=0.0001), card_bytes_per_s=100 * BYTES_PER_S,
            cards={host: rate * BYTES_PER_S for host, rate in zip(hosts, rates, strict=True)},
            cards_are_duplex=is_duplex, machines=machines,
        ),
        checkers=checkers,
    )  # fmt: skip


def of_links(layout: Layout, rates: tuple[float, ...], *, beside: bool) -> config.JobFile:
    count = len(rates)
    hosts = [
        config.Host(ssh=f"h{n}", servers=1, workers=int(beside), bandwidth=f"{rate}MB/s")
        for n, rate in enumerate(rates)
    ]
    if not beside:
        fast = {"servers": 0, "workers": 1, "bandwidth": "100MB/s"}
        hosts += [config.Host(ssh=f"w{n}", **fast) for n in range(count)]  # type: ignore[arg-type]
    options = {"target_samples": count * BATCH}
    return config.JobFile(
        job=config.Job(name="links", task="none", stop=config.Stop(steps=ROUNDS * count)),
        algorithm=config.Choice(name="target-batch", options=options),
        optimizer=config.Choice(name="sgd", options={"lr": 0.1}),
        servers=config.Servers(count=count, layout=layout),
        workers=config.Workers(count=count, batch_size=BATCH),
        data=config.Data(portion_batches=2),
        checkpoints=config.Checkpoints(every_s=0.0),
        evaluation=config.Evaluation(every_epochs=0.0),
        hosts=tuple(hosts),
        timeouts=config.Timeouts(resend_s=100.0, silent_s=100.0),
    )


# ---------------------------------------------------------------- behind shaped links

MBIT_PER_S = 10.0
"""Of a link of rate 1."""
BEFORE_S, WINDOW_S = 5.0, 20.0
LIMIT_S = 120.0
TASK = '''"""A linear model of 250,000 parameters on random numbers."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Wide:
    def model(self):
        return nn.Linear(500, 500, bias=False)

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4096, 500, generator=generator)
        return TensorDataset(inputs, inputs)

    def loss(self, model, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)


task = Wide()
'''
JOB = """[job]
name = "{layout}"
task = "train.py:task"
stop = {{ seconds = 3600 }}
[algorithm]
name = "target-batch"
target_samples = {target}
[optimizer]
name = "sgd"
lr = 0.01
[servers]
count = 4
layout = "{layout}"
[workers]
count = 4
batch_size = {batch}
device = "cpu"
threads = 1
[checkpoints]
every_s = 0
[evaluation]
every_epochs = 0
{hosts}
[[hosts]]
servers = 0
workers = 4
bandwidth = "1Gbit/s"
"""


def _shaped(*, quick: bool) -> Figure:
    what = "a round by bandwidth / in equal parts: workers elsewhere, shaped links"
    if why := missing():
        return Figure(CHAPTER, what, "x", (), ASKED, skipped=why)
    found: dict[str, list[float]] = {"equal": [], "bandwidth": []}
    with sandbox() as directory, Cluster(count=len(RATES)) as cluster:
        for name, rate in zip(cluster.names, RATES, strict=True):
            cluster.shape(name, mbit_per_s=rate * MBIT_PER_S)
        dlctl = Dlctl(cluster.enter, cluster.env)
        for _ in range(1 if quick else 3):
            for layout, took_s in found.items():
                file = _written(directory, layout, cluster.names)
                with dlctl.running(file):
                    took_s.append(_round_s(dlctl, file, WINDOW_S / 4 if quick else WINDOW_S))
                print(f"  {layout}: a round in {took_s[-1]:.3g} s", file=sys.stderr, flush=True)
    return ratio(CHAPTER, what, found["bandwidth"], found["equal"], ASKED)


def _written(directory: Path, layout: str, names: list[str]) -> Path:
    folder = directory / layout
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TASK)
    hosts = "".join(
        f'[[hosts]]\nssh = "{name}"\nservers = 1\nworkers = 0\n'
        f'bandwidth = "{rate * MBIT_PER_S:g}Mbit/s"\n'
        for name, rate in zip(names, RATES, strict=True)
    )
    file = folder / "job.toml"
    file.write_text(JOB.format(layout=layout, hosts=hosts, target=4 * BATCH, batch=BATCH))
    return file


def _round_s(dlctl: Dlctl, file: Path, window_s: float) -> float:
    """Seconds of a round; each has the same samples. Waits until the run is at work."""
    until, first = time.monotonic() + LIMIT_S, _samples(dlctl, file)
    while _samples(dlctl, file) == first:
        if time.monotonic() > until:
            raise RuntimeError(f"no round in {LIMIT_S:.0f} s")
        time.sleep(0.3)
    time.sleep(BEFORE_S)
    began, first = time.monotonic(), _samples(dlctl, file)
    time.sleep(window_s)
    rounds = (_samples(dlctl, file) - first) / (4 * BATCH)
    took_s = time.monotonic() - began
    if not rounds:
        raise RuntimeError(f"no round in {took_s:.0f} s")
    return took_s / rounds


def _samples(dlctl: Dlctl, file: Path) -> int:
    return int(json.loads(dlctl("status", "--json", "-j", str(file)))["samples"])
