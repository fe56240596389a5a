"""Whether `dlctl advise` is right: its choice against the best of a full real comparison.

Six jobs: links that are not limited, of 1 Gbit/s and of 100 Mbit/s with 5 ms, and four workers that
are equally fast, or one of them three times as slow. Each worker and the server are hosts of a
small cluster on this machine, with cards of their own, so the links are real, and so is the
measuring of them. A step of the digits sleeps for 20 ms, on one host for 60, in place of a GPU: so
these hosts do not wait for each other's cores. The simulator has the step from `--step`.

`dlctl advise` measures the links and chooses. Then each method that it has compared runs for real,
with the values that it has tuned, as `--write` puts them into a job file, and with the seeds that
it has simulated. The figure is the median time to the target with the method that it chose,
relative to the least median of all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import slow_digits
from benchmarks.figures import Figure, seconds
from benchmarks.sandbox import Dlctl, sandbox
from tests.hosts.cluster import Cluster, missing

CHAPTER = "advised"
LINKS: dict[str, tuple[float | None, float]] = {
    "fast": (None, 0.0),
    "1 Gbit/s": (1000.0, 0.25),
    "100 Mbit/s": (100.0, 5.0),
}
"""Name -> Mbit/s, and milliseconds one way."""
SPEEDS = {"equal": 1.0, "one 3x slower": 3.0}
METHODS = ("downpour", "sync", "diloco")
WORKERS, SEEDS, TRIALS = 4, 2, 4
STEPS = 300
"""Of each worker, at most."""
STEP_S = 0.02
TARGET, QUICK_TARGET = "accuracy >= 0.92", "accuracy >= 0.5"
ASKED = 1.15
LIMIT_S = 600.0
SEED = "seed = 0\n"
JOB = """[job]
name = "advised"
task = "train.py:task"
{seed}stop = {{ steps = {steps}, target = "{target}" }}
[algorithm]
name = "downpour"
[servers]
count = 1
[workers]
count = {workers}
batch_size = 16
threads = 1
device = "cpu"
[evaluation]
every_steps = 20
[checkpoints]
every_s = 0.0
[[hosts]]
ssh = "h{server}"
workers = 0
"""
HOST = '[[hosts]]\nssh = "h{}"\nservers = 0\nworkers = 1\n'


def measure(*, quick: bool) -> list[Figure]:
    jobs = {f"{link}, {speed}": (link, speed) for link, speed in product(LINKS, SPEEDS)}
    whats = {name: f"time with its choice, to the best: {name}" for name in jobs}
    asked = None if quick else ASKED
    if why := missing():
        return [Figure(CHAPTER, what, "x", (), asked, skipped=why) for what in whats.values()]
    figures = []
    with sandbox() as directory, _cluster(directory) as cluster:
        dlctl = Dlctl(cluster.enter, cluster.env, LIMIT_S)
        for name in list(jobs)[-1 if quick else 0 :]:
            link, speed = jobs[name]
            for host in cluster.names:
                cluster.shape(host, *LINKS[link])
            try:
                ratio, words = _one(dlctl, directory, SPEEDS[speed], quick=quick)
            except RuntimeError as error:
                figures.append(Figure(CHAPTER, whats[name], "x", (), asked, failed=_last(error)))
            else:
                figures.append(Figure(CHAPTER, whats[name], "x", (ratio,), asked, words))
    return figures


def _last(error: RuntimeError) -> str:
    return str(error)[-300:]


def _cluster(directory: Path) -> Cluster:
    data = slow_digits.place(directory, {})
    return Cluster(count=WORKERS + 1, shared=[data])


def _one(dlctl: Dlctl, directory: Path, slow: float, *, quick: bool) -> tuple[float, str]:
    """The ratio, and its detail. Raises RuntimeError."""
    target = QUICK_TARGET if quick else TARGET
    file = _job(directory, slow, target)
    how = ["--step", f"{1000 * STEP_S:g}ms", "--tune", str(1 if quick else TRIALS)]
    seeds = range(1, 2 if quick else SEEDS + 1)
    how += ["--seeds", str(len(seeds))]
    how += ["--methods", ",".join(METHODS[1:] if quick else METHODS)]
    how += [] if slow == 1 else ["--slow", f"worker-{WORKERS - 1}={slow:g}x"]
    advice = json.loads(dlctl("advise", str(file), "--json", *how))
    record = json.loads((Path(advice["directory"]) / "comparison.json").read_text())
    took_s: dict[str, float] = {}
    for name in record["runs"]:
        found = [_real(dlctl, file, record, name, seed) for seed in seeds]
        took_s[name] = median(float("inf") if value is None else value for value in found)
    best, choice = min(took_s, key=lambda name: took_s[name]), advice["method"]
    if took_s[choice] == float("inf"):
        raise RuntimeError(f"{choice} has not reached {target}; {best}: {took_s[best]:.3g} s")
    each = (f"{name} {seconds(took_s[name])} ({_simulated(record, name)})" for name in took_s)
    return took_s[choice] / took_s[best], f"{choice}; real (simulated): {', '.join(each)}"


def _simulated(record: Mapping[str, Any], method: str) -> str:
    from dlctl.study import table

    found = [cost for cost in table.costs_of(record)[method] if cost is not None]
    return seconds(median(found)) if found else "never"


def _job(directory: Path, slow: float, target: str) -> Path:
    times = {f"h{number}": STEP_S for number in range(1, WORKERS + 1)}
    times[f"h{WORKERS}"] *= slow
    slow_digits.place(directory, times)
    text = JOB.format(
        seed=SEED, steps=WORKERS * STEPS, target=target, workers=WORKERS, server=WORKERS + 1
    )
    file = directory / "job.toml"
    file.write_text(text + "".join(HOST.format(number) for number in range(1, WORKERS + 1)))
    return file


def _real(
    dlctl: Dlctl, file: Path, record: Mapping[str, Any], method: str, seed: int
) -> float | None:
    """Seconds to the target in a run of this method, with its tuned values; None: not reached.
    Raises RuntimeError.
    """
    from dlctl.ops import advise, run_figures
    from dlctl.records.best import Target
    from dlctl.study import judging

    own = file.with_name(f"{method}.toml")
    own.write_text(file.read_text().replace(SEED, f"seed = {seed}\n"))
    advise.write(own, record, method)
    dlctl("run", "--fresh", "-q", str(own))
    status = json.loads(dlctl("status", "--json", "-j", str(own)))
    figures = run_figures.of_run(Path(status["directory"]))
    at = judging.reached(figures, Target.parse(record["plan"]["target"]))
    return None if at is None else at.seconds
