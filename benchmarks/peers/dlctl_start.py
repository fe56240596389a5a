"""dlctl itself: `dlctl start` on a job like any other.

The parameters are read from the servers' shared memory: the result of a fetch at that moment. It
does not block the run.

The clock starts when the coordinator releases the workers: the last of them has its model and its
data and requests work, and none has received a sample, so no step is made before. The peers have a
barrier at the same point. The coordinator records the moment (`ready_at` in the run's database), so
reading it later does not shift the clock.

Options: job, the sections of the job file that differ.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.settings import Settings, from_command_line
from benchmarks.peers.watch import Watch
from benchmarks.sandbox import Dlctl, console_script, sandbox
from dlctl.job.config import Servers
from dlctl.runs import database, kept_shards, paths
from dlctl.shards import image

ROOT = Path(__file__).parents[2]
LOOK_S = 0.01
START_S_MAX = 120.0
TASK = '''"""The work of all peers, as a task."""

import sys

from torch.utils.data import TensorDataset

sys.path.insert(0, {root!r})

from benchmarks.peers import work


class Task:
    def model(self):
        return work.model_of({work!r})

    def dataset(self):
        data = work.data_of({work!r})
        return TensorDataset(data.inputs, data.labels)

    def loss(self, model, batch):
        return work.loss_of(model, *batch)


task = Task()
'''
JOB = """[job]
name = "bench"
task = "train.py:task"
seed = {seed}
stop = {{ seconds = 3600 }}
[workers]
count = {workers}
batch_size = {batch_size}
threads = 1
[checkpoints]
every_s = 0
{more}"""


class Shards:
    """The parameters of a run, read from outside while its servers are running."""

    def __init__(self, paths: list[Path]) -> None:
        self._buffers = [_mapped(path) for path in paths]
        self._forms = [image.read_header(buffer) for buffer in self._buffers]

    def pushes(self) -> int:
        """Applied by the slowest shard."""
        return min(_pushes(commit.body["state"]) for commit in self._commits())

    def parameters(self) -> Tensor:
        """float32[d]"""
        parts = zip(self._forms, self._buffers, self._commits(), strict=True)
        return torch.cat([torch.from_numpy(_values(*part)) for part in parts])

    def _commits(self) -> Iterator[image.CommittedState]:
        """The newest commit of each shard. While one is written, the previous one is intact."""
        for form, buffer in zip(self._forms, self._buffers, strict=True):
            found: list[image.CommittedState] = []
            while not found:
                both = (image.read_commit(buffer, form, which) for which in (0, 1))
                found = [commit for commit in both if commit is not None]
            yield max(found, key=lambda commit: commit.number)


def _values(form: image.ImageForm, buffer: mmap.mmap, commit: image.CommittedState) -> np.ndarray:
    """float32[n] of one shard. A sparse push may be half applied."""
    return form.vectors(buffer, commit.current)["w"].copy()


def _pushes(state: dict[str, Any]) -> int:
    """Applied so far; a new shard has no count yet."""
    deliveries = state.get("meta", {}).get("deliveries", [])
    return sum(next_number for _, _, next_number, *_ in deliveries)


def _mapped(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    watch = Watch(settings, all_wait=False)
    with sandbox() as directory, _started(directory, settings) as start:
        shards, ready_at = _wait_until_ready(start)
        watch.start(ready_at)
        while not watch.is_enough(shards.parameters, shards.pushes()):
            time.sleep(LOOK_S)
    watch.write()


@contextmanager
def _started(directory: Path, settings: Settings) -> Iterator[subprocess.Popen[str]]:
    """`dlctl start`, in progress; the run is stopped after the block."""
    (directory / "train.py").write_text(TASK.format(root=str(ROOT), work=settings.work))
    file = directory / "job.toml"
    file.write_text(
        JOB.format(
            seed=settings.seed, workers=settings.workers, batch_size=settings.batch_size,
            more=settings.options["job"].format(lr=settings.lr) + _hosts(settings),
        )
    )  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        command = [console_script(), "start", str(file)]
        start = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        try:
            yield start
            if start.wait(START_S_MAX):
                raise RuntimeError(f"`dlctl start` ended with {start.returncode}")
        except RuntimeError:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            start.kill()
            start.wait()
            Dlctl()("stop", "--kill")


def _hosts(settings: Settings) -> str:
    """One worker on each host, and the server here; "" if all daemons are here."""
    names = settings.options.get("hosts", ())
    others = [f'[[hosts]]\nssh = "{name}"\nservers = 0\nworkers = 1\n' for name in names]
    return "".join(['[[hosts]]\nssh = ""\nworkers = 0\n', *others]) if names else ""


def _wait_until_ready(start: subprocess.Popen[str]) -> tuple[Shards, float]:
    """The shards, and when the workers were released (Unix time). Raises RuntimeError if the run
    does not start."""
    until = time.monotonic() + START_S_MAX
    while time.monotonic() < until and not start.poll():
        for run in paths.all_runs():
            if (ready_at := database.read(run).get("ready_at")) is not None:
                # The servers received the initial values before that.
                places = kept_shards.places(run, Servers())
                return Shards(sorted(places[0].glob("shard-*.state"))), ready_at
        time.sleep(LOOK_S)
    raise RuntimeError("the run did not start")


if __name__ == "__main__":
    main(from_command_line())
