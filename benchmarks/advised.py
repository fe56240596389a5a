"""Whether `dlctl advise` is right: its choice against the best of a full real comparison.

Six jobs: links that are not limited, of 1 Gbit/s and of 100 Mbit/s with 5 ms, and four workers that
are equally fast, or one of them three times as slow. Each worker and the server are hosts of a
small cluster on this machine, with cards of their own, so the links are real, and so is the
measuring of them. A step of the digits sleeps for 20 ms, on one host for 60, in place of a GPU: so
these hosts do not wait for each other's cores. The simulator has the step from `--step`.

`dlctl advise` measures the links and chooses. Then the methods that it had compared run for real,
with their tuned values, on three seeds. The figure is the median time to the target with the method
that it chose, relative to the least median of all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, seconds
from benchmarks.sandbox import Dlctl, sandbox
from tests.hosts.cluster import Cluster, missing

CHAPTER = "advised"
EXAMPLE = Path(__file__).parents[1] / "examples" / "digits"
LINKS: dict[str, tuple[float | None, float]] = {
    "fast": (None, 0.0),
    "1 Gbit/s": (1000.0, 0.25),
    "100 Mbit/s": (100.0, 5.0),
}
"""Name -> Mbit/s, and milliseconds one way."""
SPEEDS = {"equal": 1.0, "one 3x slower": 3.0}
WORKERS, SEEDS, TRIALS = 4, 3, 4
STEP_S = 0.02
TARGET = "accuracy >= 0.93"
ASKED = 1.15
LIMIT_S = 3600.0
TASK = '''"""The digits, with steps that take as long as on a small GPU of each host."""

import socket
import time

from digits_task import Digits

STEP_S = {step_s}


class Slow(Digits):
    def __init__(self):
        super().__init__()
        self.sleep_s = STEP_S.get(socket.gethostname(), 0.0)

    def loss(self, model, batch):
        time.sleep(self.sleep_s)
        return super().loss(model, batch)


task = Slow()
'''
JOB = """[job]
name = "advised"
task = "train.py:task"
stop = {{ steps = {steps}, target = "{target}" }}
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
    names = [f"{link}, {speed}" for link, speed in product(LINKS, SPEEDS)]
    whats = {name: f"time with its choice, to the best: {name}" for name in names}
    asked = None if quick else ASKED
    if why := missing():
        return [Figure(CHAPTER, what, "x", (), asked, skipped=why) for what in whats.values()]
    figures = []
    with sandbox() as directory, Cluster(count=WORKERS + 1) as cluster:
        dlctl = Dlctl(cluster.enter, cluster.env, LIMIT_S)
        shutil.copy(EXAMPLE / "digits.npz", directory)
        shutil.copy(EXAMPLE / "train.py", directory / "digits_task.py")
        for link, speed in list(product(LINKS, SPEEDS))[-1 if quick else 0 :]:
            for host in cluster.names:
                cluster.shape(host, *LINKS[link])
            what = whats[f"{link}, {speed}"]
            try:
                ratio, words = _one(dlctl, directory, LINKS[link], SPEEDS[speed], quick=quick)
            except RuntimeError as error:
                figures.append(Figure(CHAPTER, what, "x", (), asked, failed=str(error)[-300:]))
            else:
                figures.append(Figure(CHAPTER, what, "x", (ratio,), asked, words))
    return figures


def _one(
    dlctl: Dlctl, directory: Path, link: tuple[float | None, float], slow: float, *, quick: bool
) -> tuple[float, str]:
    """The ratio, and its detail. Raises RuntimeError."""
    file = _job(directory, slow, steps=WORKERS * (60 if quick else 400))
    how = ["--step", f"{1000 * STEP_S:g}ms", "--tune", str(1 if quick else TRIALS)]
    how += ["--seeds", str(1 if quick else SEEDS)]
    how += [] if slow == 1 else ["--slow", f"worker-{WORKERS - 1}={slow:g}x"]
    how += ["--target", "accuracy >= 0.2"] if quick else []
    named = ["--methods", "sync,diloco"] if quick else []
    advice = json.loads(dlctl("advise", str(file), "--json", *how, *named))
    compared = _compared(Path(advice["directory"]))
    rate, delay_ms = link
    given = [] if rate is None else ["--link", f"{rate:g}Mbit/s,{delay_ms:g}ms"]
    real = ["compare", str(file), "--json", "--real", "--methods", ",".join(compared)]
    found = json.loads(dlctl(*real, *how, *given))
    took_s = {row["method"]: _median(row) for row in found["rows"]}
    reached = {name: value for name, value in took_s.items() if value is not None}
    if not reached:
        raise RuntimeError(f"{CHAPTER}: no real run has reached the target")
    best, choice = min(reached, key=lambda name: reached[name]), advice["method"]
    if choice not in reached:
        return float("inf"), f"{choice} never reached it"
    told = seconds(advice["best"]["seconds"]["median"])
    words = f"{choice} in {seconds(reached[choice])}, simulated {told}"
    return reached[choice] / reached[best], f"{words}; best {best} in {seconds(reached[best])}"


def _job(directory: Path, slow: float, *, steps: int) -> Path:
    times = {f"h{number}": STEP_S for number in range(1, WORKERS + 1)}
    times[f"h{WORKERS}"] *= slow
    (directory / "train.py").write_text(TASK.format(step_s=times))
    text = JOB.format(steps=steps, target=TARGET, workers=WORKERS, server=WORKERS + 1)
    file = directory / "job.toml"
    file.write_text(text + "".join(HOST.format(number) for number in range(1, WORKERS + 1)))
    return file


def _compared(directory: Path) -> Sequence[str]:
    record = json.loads((directory / "comparison.json").read_text())
    return [*record["runs"]]


def _median(row: dict[str, Any]) -> float | None:
    return None if row["seconds"] is None else float(row["seconds"]["median"])
