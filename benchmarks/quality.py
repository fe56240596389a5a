"""Model quality after the same number of samples: methods of dlctl against one process.

`examples/chargpt`, three seeds: `single.py` is the reference, and each job has as many samples and,
seed by seed, the same initial values. A figure is the final validation loss as a multiple of the
reference's; pushed bytes are compared with those of `sync`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.figures import Figure
from benchmarks.sandbox import pushed_bytes

CHAPTER = "quality"
EXAMPLE = Path(__file__).parents[1] / "examples" / "chargpt"
SEEDS = 3
ASKED = {"sync": 1.02, "downpour": 1.10, "diloco": 1.06, "sparseloco": 1.08}
"""Job -> its maximum loss, as a multiple of the reference's."""
BYTES_ASKED = {"diloco": 1 / 25, "sparseloco": 1 / 1000}
"""Job -> its maximum pushed bytes, as a fraction of those of "sync"."""
QUICK_SAMPLES = 640
TIMEOUT_S = 3600
DLCTL = [sys.executable, "-m", "dlctl"]


@dataclass(frozen=True)
class Ended:
    """The result of one run."""

    loss: float
    push_bytes: int


def measure(*, quick: bool) -> list[Figure]:
    seeds = range(1 if quick else SEEDS)
    samples = QUICK_SAMPLES if quick else 0
    with tempfile.TemporaryDirectory(prefix="dlctl-quality-") as name:
        directory = Path(name)
        for file in EXAMPLE.iterdir():
            if file.is_file():
                shutil.copy(file, directory)
        bare = [_single(directory, seed, samples) for seed in seeds]
        runs = {job: [_run(directory, job, seed, samples) for seed in seeds] for job in ASKED}
    figures = [_loss(job, runs[job], bare, quick=quick) for job in ASKED]
    return figures + [_pushed(job, runs, quick=quick) for job in BYTES_ASKED]


def _loss(job: str, runs: list[Ended], bare: list[float], *, quick: bool) -> Figure:
    ratios = tuple(run.loss / loss for run, loss in zip(runs, bare, strict=True))
    absolute = f"{median(run.loss for run in runs):.3f} against {median(bare):.3f}"
    asked = None if quick else ASKED[job]
    return Figure(CHAPTER, f"{job}: validation loss", "x", ratios, asked, absolute)


def _pushed(job: str, runs: Mapping[str, list[Ended]], *, quick: bool) -> Figure:
    pairs = zip(runs[job], runs["sync"], strict=True)
    ratios = tuple(run.push_bytes / sync.push_bytes for run, sync in pairs)
    absolute = f"{runs[job][0].push_bytes / 1e6:.0f} MB"
    asked = None if quick else BYTES_ASKED[job]
    return Figure(CHAPTER, f"{job}: pushed bytes, to sync", "x", ratios, asked, absolute)


def _single(directory: Path, seed: int, samples: int) -> float:
    command = [sys.executable, "single.py", "--seed", str(seed)]
    command += ["--samples", str(samples)] if samples else []
    said = _done(command, directory)
    found = re.search(r"validation loss ([0-9.]+)", said)
    assert found is not None, said
    return float(found[1])


def _run(directory: Path, job: str, seed: int, samples: int) -> Ended:
    """One run. Raises RuntimeError if it does not finish."""
    text = (EXAMPLE / f"{job}.toml").read_text().replace("[job]\n", f"[job]\nseed = {seed}\n", 1)
    if samples:
        text = re.sub("samples = [0-9_]+", f"samples = {samples}", text)
    file = directory / f"{job}-{seed}.toml"
    file.write_text(text)
    _done([*DLCTL, "run", "--fresh", "-q", file.name], directory)
    status = json.loads(_done([*DLCTL, "status", "--json", "-j", file.name], directory))
    return Ended(status["evaluation"]["val_loss"], pushed_bytes(status))


def _done(command: list[str], directory: Path) -> str:
    surroundings = os.environ | {"XDG_STATE_HOME": str(directory / "state")}
    ended = subprocess.run(
        command, cwd=directory, env=surroundings, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr}")
    return ended.stdout
