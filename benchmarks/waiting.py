"""The part of a worker's time that it stands still for pushes and fetches, at 1 Gbit/s.

Two workers, each behind a link of its own, push the top 1 % and fetch what has changed after every
step, and compute meanwhile, which is what a job does that says nothing else. The workers measure it
themselves, as `dlctl status` shows it. What they wait for is not only the link: with the server
and the two ends of the links they share the cores of this machine.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from statistics import mean

from benchmarks.figures import Figure
from benchmarks.sandbox import Dlctl, sandbox, write_job
from tests.hosts.cluster import Cluster, missing

CHAPTER = "waiting"
MBIT_PER_S, DELAY_MS = 1000.0, 0.1
WORKERS = 2
WIDTHS = ((784, 256, 128, 10), (784, 2048, 1536, 10))
TRAINING_S, LOOK_S, SILENT_S_MAX = 10.0, 1.0, 20.0
PERCENT_ASKED = 10.0
JOB = """batch_size = 32
threads = 1
[algorithm]
name = "downpour"
[compression]
name = "topk-sampled"
density = 0.01
[[hosts]]
ssh = ""
workers = 0
"""
HOST = '[[hosts]]\nssh = "{}"\nservers = 0\nworkers = 1\n'
TASK = '''"""A stack of linear layers and random pictures for it."""

from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTHS = {widths}


class Stack:
    def model(self):
        layers = [layer for pair in pairwise(WIDTHS) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    def dataset(self):
        dice = torch.Generator().manual_seed(0)
        inputs = torch.randn(8192, WIDTHS[0], generator=dice)
        return TensorDataset(inputs, torch.randint(WIDTHS[-1], (8192,), generator=dice))

    def loss(self, model, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)


task = Stack()
'''


def measure(*, quick: bool) -> list[Figure]:
    names = {widths: _name(widths) for widths in WIDTHS}
    if why := missing():
        return [
            Figure(CHAPTER, name, "%", (), PERCENT_ASKED, skipped=why) for name in names.values()
        ]
    rounds = 1 if quick else 5
    found: dict[tuple[int, ...], list[float]] = {widths: [] for widths in WIDTHS}
    with sandbox() as directory, Cluster(count=WORKERS) as cluster:
        for host in cluster.names:
            cluster.shape(host, MBIT_PER_S, DELAY_MS)
        more = JOB + "".join(map(HOST.format, cluster.names))
        dlctl = Dlctl(cluster.enter, cluster.env)
        for _ in range(rounds):
            for widths, shares in found.items():
                task = TASK.format(widths=widths)
                file = write_job(directory, servers=1, workers=WORKERS, more=more, task=task)
                with dlctl.running(file):
                    shares.append(100 * _wait_share(dlctl, 2.0 if quick else TRAINING_S))
    return [
        Figure(CHAPTER, names[widths], "%", tuple(shares), PERCENT_ASKED)
        for widths, shares in found.items()
    ]


def _name(widths: tuple[int, ...]) -> str:
    parameters = sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))
    return f"a worker's time that it waits, {parameters:,} parameters, top-k 1 %, 1 Gbit/s"


def _wait_share(dlctl: Dlctl, for_s: float) -> float:
    """The mean of what all workers say during that time, or as soon as one of them says it. Raises
    RuntimeError if that takes too long."""
    shares: list[float] = []
    begun = time.monotonic()
    while time.monotonic() < begun + for_s or not shares:
        if time.monotonic() > begun + for_s + SILENT_S_MAX:
            raise RuntimeError("no worker says how much it waits")
        time.sleep(LOOK_S)
        rows = json.loads(dlctl("status", "--json"))["daemons"]
        found = [row["metrics"].get("wait_share") for row in rows if row["role"] == "worker"]
        shares += [share for share in found if share is not None]
    return mean(shares)
