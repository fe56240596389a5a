"""The cost of pushes and fetches for a worker at 1 Gbit/s: blocked time, and total.

Two workers, each behind its own link, push the top 1 % after every step and compute while changes
are fetched, which is the default of a job; a fetch that is still in flight also serves the next
step.

The figure with a target is dlctl's own `wait_share` of `dlctl status`: blocked / (computing
gradients + blocked). With concurrent fetches, a worker is blocked when its push window is full. Its
own work for a push or an answer (add to the residual, select, pack, copy into the model) is in
neither.

The other figure includes all of it: the time of a step against that of the same run with intervals
so long that nothing is pushed or fetched. Workers wait not only for the link: they share the cores
of this machine with the server and the two ends of the links.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.figures import Figure, ratio
from benchmarks.sandbox import Dlctl, sandbox, write_job
from tests.hosts.cluster import Cluster, missing

CHAPTER = "waiting"
MBIT_PER_S, DELAY_MS = 1000.0, 0.1
WORKERS = 2
WIDTHS = ((784, 256, 128, 10), (784, 2048, 1536, 10))
TRAINING_S, LOOK_S, SILENT_S_MAX = 10.0, 1.0, 20.0
NEVER = 1_000_000
"""An interval of pushes and fetches, in steps, that exceeds the run."""
PERCENT_ASKED = 10.0
STEP_ASKED = {WIDTHS[0]: 1.6, WIDTHS[1]: 1.25}
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
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(8192, WIDTHS[0], generator=generator)
        return TensorDataset(inputs, torch.randint(WIDTHS[-1], (8192,), generator=generator))

    def loss(self, model, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)


task = Stack()
'''


def measure(*, quick: bool) -> list[Figure]:
    if why := missing():
        return [
            figure
            for widths in WIDTHS
            for figure in (
                Figure(CHAPTER, _waits(widths), "%", (), PERCENT_ASKED, skipped=why),
                Figure(CHAPTER, _costs(widths), "x", (), STEP_ASKED[widths], skipped=why),
            )
        ]
    found: dict[tuple[int, ...], list[tuple[Phase, Phase]]] = {widths: [] for widths in WIDTHS}
    with sandbox() as directory, Cluster(count=WORKERS) as cluster:
        for host in cluster.names:
            cluster.shape(host, MBIT_PER_S, DELAY_MS)
        more = JOB + "".join(map(HOST.format, cluster.names))
        dlctl = Dlctl(cluster.enter, cluster.env)
        for _ in range(1 if quick else 5):
            for widths, rounds in found.items():
                task = TASK.format(widths=widths)
                file = write_job(directory, servers=1, workers=WORKERS, more=more, task=task)
                with dlctl.running(file):
                    rounds.append(_with_and_without(dlctl, 2.0 if quick else TRAINING_S))
    return [figure for widths, rounds in found.items() for figure in _figures(widths, rounds)]


def _figures(widths: tuple[int, ...], rounds: list[tuple[Phase, Phase]]) -> list[Figure]:
    shares = tuple(100 * with_both.wait_share for with_both, _ in rounds)
    with_s, without_s = zip(*((both.step_s, none.step_s) for both, none in rounds), strict=True)
    return [
        Figure(CHAPTER, _waits(widths), "%", shares, PERCENT_ASKED),
        ratio(CHAPTER, _costs(widths), with_s, without_s, STEP_ASKED[widths]),
    ]


def _waits(widths: tuple[int, ...]) -> str:
    return f"a worker's time that it waits, {_where(widths)}"


def _costs(widths: tuple[int, ...]) -> str:
    return f"a step / one without pushes and fetches, {_where(widths)}"


def _where(widths: tuple[int, ...]) -> str:
    parameters = sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))
    return f"{parameters:,} parameters, top-k 1 %, 1 Gbit/s"


class Phase(NamedTuple):
    """Some seconds of a run, averaged over all workers."""

    wait_share: float
    step_s: float
    """Seconds per step."""
    pushes: int
    """Applied by the server."""


class Look(NamedTuple):
    """The latest reports of all daemons, about one per second."""

    steps: dict[str, tuple[float, int]]
    """Worker -> (Unix time, steps up to then)."""
    shares: list[float]
    server_at: float
    """Unix time."""
    pushes: int


def _with_and_without(dlctl: Dlctl, for_s: float) -> tuple[Phase, Phase]:
    """The same run with pushes and fetches, then without. Raises RuntimeError if the first had
    none or the second had some."""
    both = _phase(dlctl, for_s)
    if not both.pushes:
        raise RuntimeError(f"{CHAPTER}: nothing was pushed")
    dlctl("set", "worker-*", f"push_every_steps={NEVER}", f"fetch_every_steps={NEVER}")
    # In-flight pushes may still be applied.
    _looks(dlctl, lambda looks: any(_is_quiet(*pair) for pair in pairwise(looks)))
    none = _phase(dlctl, for_s)
    if none.pushes:
        raise RuntimeError(f"{CHAPTER}: {none.pushes} pushes after they were disabled")
    return both, none


def _is_quiet(before: Look, now: Look) -> bool:
    return now.server_at > before.server_at and now.pushes == before.pushes


def _phase(dlctl: Dlctl, for_s: float) -> Phase:
    """Raises RuntimeError if a worker makes no step, or sends no report for too long."""
    until = time.monotonic() + for_s
    looks = _looks(dlctl, lambda looks: time.monotonic() >= until and _is_news(looks), for_s)
    first, last = looks[0], looks[-1]
    steps_s = []
    for name, (at, steps) in last.steps.items():
        began_at, before = first.steps[name]
        if steps == before:
            raise RuntimeError(f"{CHAPTER}: {name} has made no step")
        steps_s.append((at - began_at) / (steps - before))
    shares = [share for look in looks[1:] for share in look.shares]
    return Phase(mean(shares), mean(steps_s), last.pushes - first.pushes)


def _is_news(looks: list[Look]) -> bool:
    """Whether the server and all workers have reported since `first`."""
    first, last = looks[0], looks[-1]
    are_new = [last.steps[name][0] > at for name, (at, _) in first.steps.items()]
    return all(are_new) and last.server_at > first.server_at and bool(last.shares)


def _looks(dlctl: Dlctl, is_enough: Callable[[list[Look]], bool], for_s: float = 0.0) -> list[Look]:
    """Reports until `is_enough`. Raises RuntimeError on a timeout."""
    looks: list[Look] = []
    too_late = time.monotonic() + for_s + SILENT_S_MAX
    while not (looks and is_enough(looks)):
        if time.monotonic() > too_late:
            raise RuntimeError(f"{CHAPTER}: too few reports of the server and the workers")
        time.sleep(LOOK_S)
        if look := _look(json.loads(dlctl("status", "--json"))["daemons"]):
            looks.append(look)
    return looks


def _look(rows: list[dict[str, Any]]) -> Look | None:
    """None if some daemon has not reported yet."""
    said = [row for row in rows if row.get("metrics")]
    workers = [row for row in said if row["role"] == "worker" and "step" in row["metrics"]]
    servers = [row for row in said if row["role"] == "server" and "pushes" in row["metrics"]]
    if len(workers) < WORKERS or not servers:
        return None
    shares = [row["metrics"].get("wait_share") for row in workers]
    return Look(
        steps={row["name"]: (_at(row), row["metrics"]["step"]) for row in workers},
        shares=[share for share in shares if share is not None],
        server_at=_at(servers[0]),
        pushes=servers[0]["metrics"]["pushes"],
    )


def _at(row: dict[str, Any]) -> float:
    """Unix time of a daemon's latest report."""
    return datetime.fromisoformat(row["updated_at"]).timestamp()
