"""Tables of rows on real daemons: trained, whoever dies, and exported; no worker has them."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from workplace import ENDLESS, SLOW_S, Workplace

from daemons.files.export import state_dict
from dlctl.runs import checkpoints

SAMPLES = 256
TASK = """
import threading

import torch
from torch.utils.data import TensorDataset

ROWS, WIDTH, PAUSE_S, FIXED = {rows}, {width}, {pause_s}, torch.arange(8)


class Counting:
    \"\"\"Every sample adds 1 to a row of its own, and to one that all have.\"\"\"

    def tables(self):
        return {{"own": (ROWS, WIDTH, 0.0), "common": (3, 1, 0.0)}}

    def dataset(self):
        return TensorDataset(torch.arange({samples}) * (ROWS // {samples}))

    def rows(self, batch):
        return {{"own": batch[0], "common": torch.ones_like(batch[0])}}

    def change(self, model, batch, rows, lr):
        threading.Event().wait(PAUSE_S)
        loss = 1 / (1 + rows["common"].mean())
        return loss, {{name: torch.ones_like(values) for name, values in rows.items()}}

    def evaluate(self, model, rows):
        return {{"counted": float(rows("common", torch.tensor([1])))}}


task = Counting()
"""


def counting(
    place: Workplace, stop: str, *, rows: int = 1_000, width: int = 2, pause_s: float = 0.0,
    workers: int = 2, more_servers: str = "",
) -> None:  # fmt: skip
    place.task(TASK.format(rows=rows, width=width, pause_s=pause_s, samples=SAMPLES))
    algorithm = 'name = "rows"\nsteps = 2'
    place.job(stop, workers, 2, algorithm=algorithm, more_servers=more_servers)


def exported(place: Workplace) -> dict[str, np.ndarray]:
    """What `dlctl checkpoint export` would write."""
    (newest, *_) = sorted((place.directory / "ckpt").glob("*/manifest.json"), reverse=True)
    manifest = checkpoints.read_manifest(newest.parent)
    return {name: t.numpy() for name, t in state_dict(newest.parent, manifest).items()}


def test_all_that_is_pushed_is_in_the_rows_of_the_export(place: Workplace) -> None:
    counting(place, "{ epochs = 3 }", workers=1)
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 0, ended.err
    found = exported(place)
    assert found["common"].ravel().tolist() == [0, 3 * SAMPLES, 0]
    own = found["own"]
    assert own.shape == (1_000, 2)
    assert (own[:: 1_000 // SAMPLES][:SAMPLES] == 3).all()
    assert own.sum() == 3 * SAMPLES * 2, "no other row has changed"
    assert f"counted {3 * SAMPLES}" in ended.out
    place.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_what_was_acknowledged_is_in_the_rows_once_whoever_is_killed(place: Workplace) -> None:
    counting(place, "{ epochs = 12 }", pause_s=SLOW_S)
    place.start()
    for number, name in enumerate(("server-0", "worker-1", "server-1")):
        place.until_step(60 * number + 40)
        os.kill(place.pid(name), signal.SIGKILL)
    place.until_state("finished", timeout_s=90.0)
    found = exported(place)
    common, whole = float(found["common"][1, 0]), 12 * SAMPLES
    # What a worker has pushed of a step that was not done when it died is computed again: at most
    # the window of its pushes.
    assert whole <= common <= whole + 4 * 2 * 8, place.story()
    assert found["own"].sum() == common * 2, "a push is whole on both servers"
    place.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_table_that_is_larger_than_a_workers_memory_is_trained(place: Workplace) -> None:
    """256 MB of rows; a worker may take 64 MB more than it has when it begins."""
    counting(
        place, ENDLESS, rows=1_000_000, width=64, pause_s=SLOW_S,
        more_servers='durability = "none"',
    )  # fmt: skip
    place.start()
    place.until("a worker", lambda: place.daemon("worker-0").get("pid"))
    place.until_step(4, timeout_s=60.0)
    for name in ("worker-0", "worker-1"):
        process = psutil.Process(place.pid(name))
        limit = process.memory_info().vms + 64 * 2**20
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_AS)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, hard))
    place.until_step(place.run()["step"] + 60)
    resident = [psutil.Process(place.pid(f"server-{n}")).memory_info().rss for n in (0, 1)]
    assert min(resident) > 128 * 2**20, "it is there"
    status = Path(f"/proc/{place.pid('worker-0')}/status").read_text()
    peak, now = (int(status.partition(key)[2].split()[0]) for key in ("VmHWM:", "VmRSS:"))
    assert peak < now + 64 * 1024, "kB; nor was it there when it began"
    assert not place.events("exit"), place.story()
    assert place.dlctl("stop").code == 0
    place.nothing_left()
