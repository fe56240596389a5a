"""With batch_size = "auto" the largest power of two that there is memory for is found by trying."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from daemons.worker import batch_size_search
from daemons.worker.building import Built, build
from daemons.worker.task.user_task import TaskError
from dlctl.job.config import Data, Gradients, Job, JobFile, Workers

TASK = """
    import random
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    tried = []

    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + random.random() + torch.rand(())

    def model():
        return Net(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout())

    def dataset():
        return TensorDataset(torch.arange(3.0 * 4096).reshape(4096, 3).sin())

    def loss(model, batch):
        size = len(batch[0])
        tried.append(size)
        {loss}
        return model(batch[0]).square().mean()
    """
STREAM = """    tried = []

    class Stream:
        def __iter__(self):
            return iter((torch.rand(3),) for _ in range(1000))
"""
NO_ROOM = "if size > {}: raise torch.OutOfMemoryError('CUDA out of memory')"
EIGHT_MB = "room = torch.ones(size, 2**21)"


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Built]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    # What earlier tests have left would be freed while memory is measured.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)

    def build_it(loss: str = "", *, finds: bool = True, **workers: Any) -> Built:
        sys.modules.pop("fitted", None)
        (tmp_path / "fitted.py").write_text(dedent(TASK).format(loss=loss))
        return build(job(tmp_path / "fitted.py", **workers), 0, 0, finds=finds)

    return build_it


def job(task: Path, count: int = 1, **gradient: Any) -> JobFile:
    return JobFile(
        job=Job(name="fitted", task=str(task)),
        workers=Workers(count=count, batch_size="auto", device="cpu", threads=1),
        gradient=Gradients(**gradient),
        data=Data(portion_batches=2),
    )


def sizes_tried() -> list[int]:
    import sys

    found: list[int] = sys.modules["fitted"].tried  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("room", "found", "tried"),
    [
        (40, 32, [8, 16, 32, 64]),
        (8, 8, [8, 16]),
        (7, 4, [8, 4]),
        (10_000, 1024, [8, 16, 32, 64, 128, 256, 512, 1024]),
    ],
)
def test_it_doubles_until_there_is_no_memory(built, room, found, tried):
    stepper, loader, _, size, *_ = built(NO_ROOM.format(room))
    assert (size, loader.batch_size) == (found, found)
    assert sizes_tried() == tried
    step = stepper.step(loader.step(0, 0, 4096, 0).batches)
    assert step.is_usable


def test_without_memory_for_one_sample_the_error_is_that_of_any_step(built):
    with pytest.raises(TaskError, match="OutOfMemoryError") as caught:
        built(NO_ROOM.format(0))
    assert sizes_tried()[:4] == [8, 4, 2, 1]
    assert "1 sample" in (caught.value.hint or "")


def test_of_a_stream_the_first_samples_are_tried(built, monkeypatch):
    monkeypatch.setitem(batch_size_search.SIZE_MAX, "cpu", 64)
    stream = "return Stream()"
    text = TASK.replace(
        "return TensorDataset(torch.arange(3.0 * 4096)",
        f"{stream}\n        (torch.arange(3.0 * 4096)",
    )
    monkeypatch.setitem(globals(), "TASK", text.replace("    tried = []", STREAM))
    found = built()
    assert (found.batch_size, found.loader.shards) == (64, 1)
    assert sizes_tried() == [8, 16, 32, 64]


def test_another_error_of_the_task_is_its_own(built):
    with pytest.raises(TaskError, match=r"task\.loss.*ValueError"):
        built("raise ValueError('no')")


def test_on_the_cpu_half_of_what_is_available_stays_free(built, monkeypatch):
    """A batch of 32 takes 256 MB, and one of 64 would take 512."""
    monkeypatch.setattr(batch_size_search, "available", lambda: 800_000_000)
    size = built(EIGHT_MB).batch_size
    assert size == 32


def test_workers_of_one_machine_share_what_it_has(built, monkeypatch):
    monkeypatch.setattr(batch_size_search, "available", lambda: 800_000_000)
    size = built(EIGHT_MB, count=4).batch_size
    assert size in (8, 16), "memory that the process has kept may hide a part of what it takes"


def test_a_slow_batch_need_not_be_larger_on_the_cpu(built, monkeypatch):
    monkeypatch.setattr(batch_size_search, "SLOW_S", 0.0)
    size = built().batch_size
    assert size == 8


def test_an_epoch_has_a_portion_for_every_worker():
    several = job(Path("none"), count=4, accumulate=2)
    assert batch_size_search.limit(several, 4096, "cpu") == 256
    assert batch_size_search.limit(several, 4095, "cpu") == 128
    assert batch_size_search.limit(several, 3, "cpu") == 1
    one = job(Path("none"))
    assert batch_size_search.limit(one, 10**9, "cpu") == 1024
    assert batch_size_search.limit(one, 10**9, "cuda") == 65536


def test_nothing_of_it_stays(built):
    """Values, buffers, modes, generators: the first step is the same to the last bit."""

    def first_step(*, finds: bool) -> list[Any]:
        stepper, loader, _, size, *_ = built(finds=finds)
        assert bool(size) == finds
        loader.resize(16)
        replica = stepper.replica
        drawn = [float(torch.rand(())), random.random(), float(np.random.random())]
        before = [replica.parameters.tolist(), replica.averaged().tolist(), replica.model.training]
        step = stepper.step(loader.step(1, 0, 64, 0).batches)
        assert step.gradient is not None
        after = [step.loss, step.gradient.tolist(), replica.averaged().tolist()]
        return [*drawn, *before, *after]

    assert first_step(finds=True) == first_step(finds=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
def test_on_a_gpu_a_tenth_of_the_memory_stays_free(tmp_path):
    from dataclasses import replace

    (tmp_path / "fitted.py").write_text(
        dedent(TASK).format(loss="room = torch.ones(size, 2**28, device='cuda')")
    )
    of_gpu = job(tmp_path / "fitted.py")
    of_gpu = replace(of_gpu, workers=replace(of_gpu.workers, device="cuda"))
    size = build(of_gpu, 0, 0, finds=True).batch_size
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    assert size * 2**30 <= 0.9 * free < 2 * size * 2**30 + 2**28
