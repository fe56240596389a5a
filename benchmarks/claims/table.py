"""The big table: every method in five conditions, tuned equally, on a small GPT.
`python -m benchmarks.claims.table [CELLS]`

A cell is a method in a condition: time, bytes, samples and loss of each evaluation, for each seed.
The rates of a method are tuned once, on loopback. Cells that are done are
kept in `benchmarks/results/table.json`, so it may be interrupted; all of it takes two hours of a
core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dlctl import registry
from dlctl.errors import DlctlError
from dlctl.ops import claims
from dlctl.ops.claims import SimulatedLab
from dlctl.sim.request import LinkSpeed
from dlctl.study.claims import jobs
from dlctl.study.claims.base import Arm

RESULTS = Path(__file__).parents[1] / "results" / "table.json"
WORKERS, STEPS = 4, 160
STEP_S = 0.05
TARGET = "val_loss <= 2.9"
"""Of trials: who does not reach it is ranked by the lowest loss."""
TRIALS = 3
SEEDS = 3
CONDITIONS: dict[str, dict[str, Any]] = {
    "loopback": {},
    "1 Gbit/s": {"link": LinkSpeed(bytes_per_s=125e6, latency_s=0.0005)},
    "100 Mbit/s, 5 ms": {"link": LinkSpeed(bytes_per_s=12.5e6, latency_s=0.005)},
    "one 3x slower": {"slow": {"worker-3": 3.0}},
    "kills": {"kill_every_s": {"worker": 5.0, "server": 10.0}},
}
LEFT_OUT = ("hogwild", "split", "rows", "sandblaster")
"""Methods that share memory, divide the model, are for embeddings alone, or whose batch is all of
the data."""
INTERVALS = {"local_steps": 10, "exchange_every_steps": 10, "buffer_pushes": 4, "delay_steps": 1}
"""For methods with such a key: the defaults are for runs a hundred times as long."""


def main(cells_max: int) -> None:
    """cells_max: how many to compute now."""
    done: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    names = [name for name in registry.BUILT_IN["algorithms"] if name not in LEFT_OUT]
    cells = [(name, condition) for condition in CONDITIONS for name in names]
    left = [(name, condition) for name, condition in cells if condition not in done.get(name, {})]
    with claims.lab(5, 1) as lab:
        lab.seeds = range(1, 1 + SEEDS)
        job = jobs.small_gpt(
            stop=f"steps = {WORKERS * STEPS}", workers=WORKERS, batch=8, portion=10,
            evaluation="every_steps = 20",
        )  # fmt: skip
        lab.place("chargpt", job, {"small.py": jobs.SMALL})
        for name, condition in left[: max(0, cells_max)]:
            row = done.setdefault(name, {})
            row[condition] = _cell(lab, name, condition, row)
            RESULTS.write_text(json.dumps(done) + "\n")
            print(name, condition, _last(row[condition]), file=sys.stderr, flush=True)


def _cell(lab: SimulatedLab, name: str, condition: str, row: dict[str, Any]) -> dict[str, Any]:
    """{"curves": for each seed the evaluations, "tuned": the rates}; or {"error"}."""
    arm = _arm(name)
    known = next((cell["tuned"] for cell in row.values() if "tuned" in cell), None)
    try:
        if known is None:
            tuned = lab.tuned({name: arm}, TARGET, TRIALS)[name]
            known = {key: value for key, value in tuned.changes.items() if key.endswith(".lr")}
        made = arm.having(known).under(**CONDITIONS[condition])
        (runs,) = lab.run({name: made}).values()
    except DlctlError as error:
        return {"error": error.message}
    return {"curves": [run and _curve(run.figures) for run in runs], "tuned": known}


def _curve(figures: dict[str, Any]) -> list[list[float]]:
    """Of each evaluation the seconds, megabytes, samples and the loss."""
    return [
        [
            round(row["seconds"], 2), round(row["bytes"] / 1e6, 3), round(row["samples"]),
            round(row["metrics"]["val_loss"], 4),
        ]
        for row in figures["evaluations"]
    ]  # fmt: skip


def _last(cell: dict[str, Any]) -> Any:
    """For the log."""
    return cell.get("error") or [curve and curve[-1] for curve in cell["curves"]]


def _arm(name: str) -> Arm:
    method = registry.load("algorithms", name)
    own = method.Options()
    intervals = {key: value for key, value in INTERVALS.items() if hasattr(own, key)}
    changes = {f"algorithm.{key}": value for key, value in intervals.items()}
    return Arm(method=name, changes=changes, conditions={"step_s": STEP_S})


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 10_000)
