"""A thousand workers on three networks with three sizes of models: how many steps they make, what
saturates and at how many workers. `python -m benchmarks.projection [--workers N] [--real] [CELLS]`

`dlctl simulate --protocol` with 16 servers, each worker and server on a machine of its own, and
steps of a second: of `sync`, and of `downpour` with top-k pushes. Cells that are done are kept in
`benchmarks/results/projection.json`, so it may be interrupted; a cell takes up to three minutes of
a core, and with `--workers 250` mostly a fourth of that: what a thousand do is foretold then. The
window follows the load: it is some times as long as a round takes, minutes on a slow link.

`--real` measures the error where there are machines for it: runs of 2, 4 and 8 workers on this one,
which should have nothing else to do, against simulations that were calibrated on the run of 4; a
step sleeps in place of a GPU. That takes three minutes. Both write the page of the documents.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import slow_digits
from benchmarks.sandbox import TASK, Dlctl, sandbox
from dlctl.util import units

Json = dict[str, Any]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "projection.json"
PAGE = ROOT / "docs" / "projection.py"
LINKS = ("1Gbit/s", "10Gbit/s", "100Gbit/s")
SIZES = {"10 M": 10_000_000, "1 M": 1_000_000, "100 M": 100_000_000}
"""The first ones are simulated first."""
WORKERS, SERVERS, STEP_S = 1000, 16, 1.0
ROUNDS, WITHIN = 4, "150s"
REAL_WORKERS = (4, 2, 8)
"""The first one calibrates."""
REAL_STEPS, REAL_STEP_S = 6000, 0.02
LIMIT_S = 3600.0
JOB = """[job]
name = "many"
task = "train.py:task"
stop = {{ {stop} }}
[algorithm]
{method}
[servers]
count = {servers}
[workers]
count = {workers}
batch_size = 64
threads = 1
device = "cpu"
[checkpoints]
every_s = 0.0
"""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a worker sends and gets in a round."""

    method: str
    """Of the job file."""
    steps: int
    push_bytes: float
    """For each parameter; likewise the next."""
    fetch_bytes: float

    def round_s(self, parameters: int, bytes_per_s: float, workers: int) -> float:
        """How long a round takes at most, if nobody waits for a processor."""
        queue = max(1.0, workers / SERVERS)
        nbytes = parameters * (self.push_bytes + self.fetch_bytes)
        return self.steps * STEP_S + queue * nbytes / bytes_per_s


DENSITY, PLACE_BYTES = 0.01, 1.0
"""Of a top-k push; a chosen element is a value, and about a byte that says where it is."""
METHODS = {
    "sync": Traffic(method='name = "sync"', steps=1, push_bytes=4, fetch_bytes=4),
    "downpour, top 1 %": Traffic(
        method='name = "downpour"\nfetch_every_steps = 5\npush_every_steps = 5\n[compression]\n'
        f'name = "topk"\ndensity = {DENSITY}',
        steps=5, push_bytes=DENSITY * (4 + PLACE_BYTES), fetch_bytes=4,
    ),
}  # fmt: skip


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.projection", description=__doc__)
    everything = [(name, size, link) for size, link, name in product(SIZES, LINKS, METHODS)]
    parser.add_argument("cells", nargs="?", type=int, default=len(everything))
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--real", action="store_true")
    options = parser.parse_args(arguments)
    done: Json = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}
    most = {name: cell["said"]["windows"][-1]["workers"] for name, cell in done["cells"].items()}
    missing = [of for of in everything if most.get(", ".join(of), 0) < options.workers]
    with sandbox() as directory:
        if options.real:
            done["real"] = _real(directory)
            _keep(done)
        for of in missing[: options.cells]:
            done["cells"][", ".join(of)] = _cell(directory, *of, options.workers)
            _keep(done)
            print(*of, "is done", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, str(PAGE)], check=True)


def _keep(done: Mapping[str, Any]) -> None:
    RESULTS.write_text(json.dumps(done, indent=1) + "\n")


def _cell(directory: Path, method: str, size: str, link: str, workers: int) -> Json:
    """What `dlctl simulate --protocol --json` prints, and what it was asked."""
    traffic, parameters = METHODS[method], SIZES[size]
    file = _job(directory, traffic.method, SERVERS, workers, "seconds = 3600")
    round_s = traffic.round_s(parameters, units.parse_rate(link) or math.inf, workers)
    how = ["--link", link, "--parameters", str(parameters), "--step", f"{STEP_S:g}s"]
    how += ["--until", f"{math.ceil(ROUNDS * round_s)}s", "--within", WITHIN]
    said = _simulated(file, ["--protocol", "--json", *how])
    of = {**asdict(traffic), "servers": SERVERS}
    return {"method": method, "size": size, "link": link, "traffic": of, "said": said}


def _simulated(file: Path, how: list[str]) -> Json:
    data: Json = json.loads(Dlctl(limit_s=LIMIT_S)("simulate", str(file), *how))
    return data


def _real(directory: Path) -> list[Json]:
    """[{"workers", "real", "foretold": steps per second, "judged": whether it had its cores}]."""
    from dlctl.ops import run_figures

    slow_digits.place(directory, {}, REAL_STEP_S)
    digits = (directory / "train.py").read_text()
    dlctl, like = Dlctl(limit_s=LIMIT_S), ""
    found: list[Json] = []
    for count in REAL_WORKERS:
        file = _job(directory, 'name = "downpour"', 1, count, f"steps = {REAL_STEPS}", digits)
        dlctl("run", "--fresh", "-q", str(file))
        status = json.loads(dlctl("status", "--json", "-j", str(file)))
        figures = run_figures.of_run(Path(status["directory"]))
        like = like or status["run_id"]
        told = _simulated(file, ["--protocol", "--json", "--like", like, "--until", "10s"])
        row = {"workers": count, "real": figures["step"] / figures["seconds"]}
        row["foretold"] = told["windows"][-1]["steps_per_s"]
        again = json.loads(dlctl("simulate", "--json", "--like", status["run_id"], str(file)))
        row["judged"] = again["replay"]["is_judged"]
        found.append(row)
        print(row, file=sys.stderr, flush=True)
    return found


def _job(
    directory: Path, method: str, servers: int, workers: int, stop: str, task: str = TASK
) -> Path:
    (directory / "train.py").write_text(task)
    file = directory / "job.toml"
    file.write_text(JOB.format(method=method, servers=servers, workers=workers, stop=stop))
    return file


if __name__ == "__main__":
    main(sys.argv[1:])
