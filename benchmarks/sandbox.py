"""A place of its own for a measurement: state, sockets and files that nobody else sees."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_LIMIT_S = 300.0

TASK = '''"""The smallest task: a linear model of ten parameters on random numbers."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Line:
    def model(self):
        return nn.Linear(9, 1)

    def dataset(self):
        dice = torch.Generator().manual_seed(0)
        inputs = torch.randn(4096, 9, generator=dice)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def loss(self, model, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)


task = Line()
'''


@contextmanager
def sandbox() -> Iterator[Path]:
    """A temporary directory; dlctl and what it starts keep their state and sockets in it."""
    with tempfile.TemporaryDirectory(prefix="dlctl-bench-") as name:
        directory = Path(name)
        ours = {"XDG_STATE_HOME": f"{name}/state", "XDG_RUNTIME_DIR": f"{name}/run"}
        before = {key: os.environ.get(key) for key in ours}
        (directory / "run").mkdir(mode=0o700)
        os.environ.update(ours)
        try:
            yield directory
        finally:
            for key, value in before.items():
                os.environ.pop(key)
                os.environ.update({key: value} if value is not None else {})


def write_job(directory: Path, *, servers: int, workers: int) -> Path:
    """A job that goes on until it is stopped; returns its file. Its task is train.py beside it."""
    (directory / "train.py").write_text(TASK)
    file = directory / "job.toml"
    file.write_text(
        '[job]\nname = "bench"\ntask = "train.py:task"\nstop = { seconds = 3600 }\n'
        f"[servers]\ncount = {servers}\n[workers]\ncount = {workers}\n"
    )
    return file


def dlctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the console script beside this Python. Raises CalledProcessError if it fails."""
    return subprocess.run(
        [console_script(), *arguments],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=START_LIMIT_S,
    )


def console_script() -> str:
    """The installed `dlctl`. Raises SystemExit if dlctl is not installed for this Python."""
    script = Path(sysconfig.get_path("scripts")) / "dlctl"
    if not script.exists():
        sys.exit(f"dlctl is not installed for {sys.executable}: run `make install`")
    return str(script)
