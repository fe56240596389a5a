"""A thousand workers on three networks with three sizes of models: how many steps they make, what
saturates and at how many workers. `python -m benchmarks.projection [--real] [CELLS]`

`dlctl simulate --protocol` of `sync` with 16 servers, each worker and server on a machine of its
own, and steps of a second. Cells that are done are kept in `benchmarks/results/projection.json`, so
it may be interrupted; a cell takes up to three minutes of a core. `--real` measures the error
where there are machines for it: runs of 2, 4 and 8 workers on this one, which should have nothing
else to do, against simulations that were calibrated on the run of 4. That takes two minutes. Both
write the page of the documents.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.sandbox import TASK, Dlctl, sandbox

Json = dict[str, Any]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "projection.json"
PAGE = ROOT / "docs" / "projection.py"
LINKS = ("1Gbit/s", "10Gbit/s", "100Gbit/s")
SIZES = {"10 M": 10_000_000, "100 M": 100_000_000, "1,000 M": 1_000_000_000}
WORKERS, SERVERS, STEP_S = 1000, 16, 1.0
FEW = 16
"""So many are simulated as well: the load of each worker is to be seen where nobody waits."""
UNTIL_S, WITHIN = 20, "150s"
REAL_WORKERS = (4, 2, 8)
"""The first one calibrates."""
REAL_STEPS = 20_000
LIMIT_S = 1800.0
JOB = """[job]
name = "many"
task = "train.py:task"
stop = {{ {stop} }}
[algorithm]
name = "{method}"
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


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.projection", description=__doc__)
    parser.add_argument("cells", nargs="?", type=int, default=len(LINKS) * len(SIZES))
    parser.add_argument("--real", action="store_true")
    options = parser.parse_args(arguments)
    done: Json = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}
    with sandbox() as directory:
        if options.real:
            done["real"] = _real(directory)
            _keep(done)
        names = [f"{size}, {link}" for size, link in product(SIZES, LINKS)]
        for name in [name for name in names if name not in done["cells"]][: options.cells]:
            size, _, link = name.rpartition(", ")
            done["cells"][name] = _cell(directory, SIZES[size], link)
            _keep(done)
            print(name, "is done", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, str(PAGE)], check=True)


def _keep(done: Mapping[str, Any]) -> None:
    RESULTS.write_text(json.dumps(done, indent=1) + "\n")


def _cell(directory: Path, parameters: int, link: str) -> Json:
    """{"many", "few": what `dlctl simulate --protocol --json` prints}."""
    file = _job(directory, "sync", SERVERS, WORKERS, "seconds = 3600")
    how = ["--protocol", "--json", "--link", link, "--parameters", str(parameters)]
    how += ["--step", f"{STEP_S:g}s", "--until", f"{UNTIL_S}s", "--within", WITHIN]
    return {
        name: _simulated(file, [*how, "--workers", str(count)])
        for name, count in (("many", WORKERS), ("few", FEW))
    }


def _simulated(file: Path, how: list[str]) -> Json:
    data: Json = json.loads(Dlctl(limit_s=LIMIT_S)("simulate", str(file), *how))
    return data


def _real(directory: Path) -> list[Json]:
    """[{"workers", "real", "foretold": steps per second}]."""
    from dlctl.ops import run_figures

    shutil.copy(ROOT / "examples" / "digits" / "digits.npz", directory)
    digits = (ROOT / "examples" / "digits" / "train.py").read_text()
    dlctl, like = Dlctl(limit_s=LIMIT_S), ""
    found: list[Json] = []
    for count in REAL_WORKERS:
        file = _job(directory, "downpour", 1, count, f"steps = {REAL_STEPS}", digits)
        dlctl("run", "--fresh", "-q", str(file))
        status = json.loads(dlctl("status", "--json", "-j", str(file)))
        figures = run_figures.of_run(Path(status["directory"]))
        like = like or status["run_id"]
        told = _simulated(file, ["--protocol", "--json", "--like", like, "--until", "10s"])
        real = figures["step"] / figures["seconds"]
        steps = told["windows"][-1]["steps_per_s"]
        found.append({"workers": count, "real": real, "foretold": steps})
    return found


def _job(
    directory: Path, method: str, servers: int, workers: int, stop: str, task: str = TASK
) -> Path:
    (directory / "train.py").write_text(task)
    file = directory / f"{method}-{workers}.toml"
    file.write_text(JOB.format(method=method, servers=servers, workers=workers, stop=stop))
    return file


if __name__ == "__main__":
    main(sys.argv[1:])
