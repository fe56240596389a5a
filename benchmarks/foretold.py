"""Three runs that nobody calibrated on, foretold by `dlctl simulate --like` another one.

That other run is of the same task with another method. Three jobs that differ from it in method,
number of workers and number of servers are then run for real, and simulated like it. A time is
foretold if it is off by no more than the simulation says that it may be. The figure is the time's
error relative to that, so it is foretold up to 1.

A step of the digits sleeps for 20 ms in place of a GPU: else the daemons of each run would mostly
wait for each other's cores, where there are two of them. All of this is about this machine alone:
where workers waited for its cores for long, in that run or in one that is foretold, nothing can be
judged, and the figures are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import slow_digits
from benchmarks.figures import Figure, seconds
from benchmarks.sandbox import Dlctl, sandbox
from dlctl.ops import calibrate
from dlctl.ops.calibrate import WAITED_SHARE
from dlctl.runs import snapshot

CHAPTER = "foretold"
ROUNDS = 3
RUN_S_MAX = 600.0
STEP_S = 0.02
Kind = tuple[str, str, int, int]
"""Method, its other keys, workers, servers."""
CALIBRATED: Kind = ("downpour", "", 4, 1)
JOBS: dict[str, Kind] = {
    "sync, 4 workers": ("sync", "", 4, 1),
    "ssp, 3 workers, 2 servers": ("ssp", "", 3, 2),
    "diloco, 4 workers": ("diloco", "local_steps = 20", 4, 1),
}
JOB = """[job]
name = "{name}"
task = "train.py:task"
seed = {seed}
stop = {{ steps = {steps} }}
[algorithm]
name = "{method}"
{more}
[servers]
count = {servers}
[workers]
count = {workers}
batch_size = 64
threads = 1
device = "cpu"
[evaluation]
every_epochs = 5.0
[checkpoints]
every_s = 0.0
"""


def measure(*, quick: bool) -> list[Figure]:
    found: dict[str, list[tuple[float, str]]] = {name: [] for name in JOBS}
    unjudged, failed = "", ""
    with sandbox() as directory:
        slow_digits.place(directory, {}, STEP_S)
        dlctl = Dlctl(limit_s=RUN_S_MAX)
        for number in range(1 if quick else ROUNDS):
            try:
                unjudged = _round(dlctl, directory, number, found, quick=quick) or unjudged
            except RuntimeError as error:
                failed = str(error)[-300:]
    return [
        Figure(
            CHAPTER, f"{name}: error of its time, to the printed one", "x",
            () if unjudged else tuple(share for share, _ in rows), None if quick else 1.0,
            "; ".join(words for _, words in rows), unjudged, failed,
        )
        for name, rows in found.items()
    ]  # fmt: skip


def _round(
    dlctl: Dlctl,
    directory: Path,
    number: int,
    found: Mapping[str, list[tuple[float, str]]],
    *,
    quick: bool,
) -> str:
    """Adds to `found`; returns why nothing can be judged, "" if it can. Raises RuntimeError."""
    steps = 400 if quick else 2400
    run_id = _ran(dlctl, _job(directory, CALIBRATED, number, steps))["run_id"]
    unjudged = ""
    for name, kind in JOBS.items():
        file = _job(directory, kind, number, steps)
        real = _ran(dlctl, file)
        real_s = _took_s(real)
        told = json.loads(dlctl("simulate", "--json", "--like", run_id, str(file)))
        replay = told["replay"]
        if max(replay["waited_share"], _waited_share(real)) > WAITED_SHARE:
            unjudged = "workers waited for cores for too long: its error cannot be judged"
        printed = replay["expected_error"]
        share = told["seconds"] / real_s - 1
        found[name].append(
            (
                abs(share) / printed,
                f"{seconds(told['seconds'])} for {seconds(real_s)}, printed {100 * printed:.1f} %",
            )
        )
    return unjudged


def _job(directory: Path, kind: Kind, seed: int, steps: int) -> Path:
    method, more, workers, servers = kind
    file = directory / f"{method}-{seed}.toml"
    text = JOB.format(
        name=file.stem, seed=seed, steps=steps, method=method, more=more, servers=servers,
        workers=workers,
    )  # fmt: skip
    file.write_text(text)
    return file


def _ran(dlctl: Dlctl, file: Path) -> dict[str, Any]:
    """Its status at the end."""
    dlctl("run", "--fresh", "-q", str(file))
    status: dict[str, Any] = json.loads(dlctl("status", "--json", "-j", str(file)))
    return status


def _waited_share(status: Mapping[str, Any]) -> float:
    return calibrate.of_run(snapshot.load(Path(status["directory"]))).waited_share


def _took_s(status: Mapping[str, Any]) -> float:
    """From the first step on, as `dlctl simulate` counts."""
    from dlctl.ops import run_figures

    return float(run_figures.of_run(Path(status["directory"]))["seconds"])
