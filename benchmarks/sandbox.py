"""An isolated environment for a measurement: its own state, sockets and files."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 300.0
"""Timeout of one command that does not train; a longer start has failed."""

TASK = '''"""The smallest task: a linear model of ten parameters on random numbers."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Line:
    def model(self):
        return nn.Linear(9, 1)

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4096, 9, generator=generator)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def loss(self, model, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)


task = Line()
'''


@contextmanager
def sandbox() -> Iterator[Path]:
    """A temporary directory for the state and sockets of dlctl and its processes."""
    with tempfile.TemporaryDirectory(prefix="dlctl-bench-") as name:
        (Path(name) / "run").mkdir(mode=0o700)
        ours = {
            "XDG_STATE_HOME": f"{name}/state",
            "XDG_RUNTIME_DIR": f"{name}/run",
            "DLCTL_JOB": None,  # or `dlctl stop` would stop that run
        }
        before = {key: os.environ.get(key) for key in ours}
        _set_environment(ours)
        try:
            yield Path(name)
        finally:
            _set_environment(before)


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for key, value in variables.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value


def write_job(
    directory: Path, *, servers: int, workers: int, more: str = "", task: str = TASK
) -> Path:
    """A job that runs until it is stopped; returns its file. Its task is train.py beside it.

    `more`: sections to append.
    """
    (directory / "train.py").write_text(task)
    file = directory / "job.toml"
    file.write_text(
        '[job]\nname = "bench"\ntask = "train.py:task"\nstop = { seconds = 3600 }\n'
        f"[servers]\ncount = {servers}\n[workers]\ncount = {workers}\n{more}"
    )
    return file


class Dlctl:
    """The console script beside this Python, run directly or with a namespace command in front."""

    def __init__(
        self,
        enter: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.enter, self.env, self.limit_s = enter, env, limit_s

    @contextmanager
    def running(self, file: Path) -> Iterator[float]:
        """Start a new run of this job; yields the seconds until ready. Stops it after the block."""
        try:
            began = time.perf_counter()
            self("start", "--fresh", str(file))
            yield time.perf_counter() - began
        finally:
            self("stop", "--no-checkpoint")

    def __call__(self, *arguments: str) -> str:
        """Its stdout. Raises RuntimeError with its stderr if it fails."""
        command = [*self.enter, console_script(), *arguments]
        ended = subprocess.run(
            command, text=True, capture_output=True, timeout=self.limit_s, env=self.env
        )
        if ended.returncode:
            said = f"`dlctl {' '.join(arguments)}` ended with {ended.returncode}:\n{ended.stderr}"
            raise RuntimeError(said)
        return ended.stdout


def pushed_bytes(status: dict[str, Any]) -> int:
    """Pushed bytes of all workers. status: of `dlctl status --json`."""
    workers = [row["metrics"] or {} for row in status["daemons"] if row["role"] == "worker"]
    return sum(metrics.get("push_bytes", 0) for metrics in workers)


def console_script() -> str:
    """The installed `dlctl`. Raises SystemExit if dlctl is not installed for this Python."""
    script = Path(sysconfig.get_path("scripts")) / "dlctl"
    if not script.exists():
        sys.exit(f"dlctl is not installed for {sys.executable}: run `make install`")
    return str(script)
